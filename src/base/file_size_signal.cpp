#include "base/file_size_signal.h"

#include <cerrno>
#include <ctime>

namespace tessera {
namespace {

sigset_t file_size_signal() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGXFSZ);
  return set;
}

bool is_pending() {
  sigset_t pending;
  return sigpending(&pending) == 0 && sigismember(&pending, SIGXFSZ) == 1;
}

}  // namespace

FileSizeSignalBlock::FileSizeSignalBlock() {
  const int reason = errno;
  const auto set = file_size_signal();
  pthread_sigmask(SIG_BLOCK, &set, &before_);
  was_pending_ = is_pending();
  errno = reason;
}

FileSizeSignalBlock::~FileSizeSignalBlock() {
  const int reason = errno;
  // The kernel sends it to the thread that wrote, so it is here to be taken back.
  if (!was_pending_ && is_pending()) {
    const auto set = file_size_signal();
    const timespec at_once{};
    sigtimedwait(&set, nullptr, &at_once);
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = reason;
}

}  // namespace tessera
