#include "base/signal_block.h"

#include <cerrno>
#include <ctime>

namespace tessera {
namespace {

bool is_pending(int signal) {
  sigset_t pending;
  return sigpending(&pending) == 0 && sigismember(&pending, signal) == 1;
}

}  // namespace

SignalBlock::SignalBlock(int signal) : signal_(signal) {
  const int reason = errno;
  sigemptyset(&set_);
  sigaddset(&set_, signal);
  pthread_sigmask(SIG_BLOCK, &set_, &before_);
  was_pending_ = is_pending(signal);
  errno = reason;
}

SignalBlock::~SignalBlock() {
  const int reason = errno;
  // The kernel sends it to the thread that wrote, so it is here to be taken back.
  if (!was_pending_ && is_pending(signal_)) {
    const timespec at_once{};
    sigtimedwait(&set_, nullptr, &at_once);
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = reason;
}

}  // namespace tessera
