#include "comm/dump_signal.h"

#include <tessera/comm.h>

#include <c10/util/thread_name.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <iostream>
#include <mutex>
#include <thread>

namespace tessera::comm {
namespace {

int wake_descriptor = -1;

void wake(int) {
  const int saved = errno;
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(wake_descriptor, &one, sizeof(one));
  errno = saved;
}

void dump_whenever_woken() {
  c10::setThreadName("tessera_dump");
  uint64_t count = 0;
  while (true) {
    const auto got = read(wake_descriptor, &count, sizeof(count));
    if (got == sizeof(count)) {
      std::cerr << recent_collectives() << std::flush;
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace

void dump_on_signal(int signal) {
  if (signal == 0) return;
  static std::mutex mutex;  // thread ranks join at the same time
  const std::lock_guard lock(mutex);
  struct sigaction present{};
  if (sigaction(signal, nullptr, &present) != 0 || present.sa_handler != SIG_DFL) return;
  if (wake_descriptor < 0) {
    wake_descriptor = eventfd(0, EFD_CLOEXEC);
    if (wake_descriptor < 0) return;
    std::thread(dump_whenever_woken).detach();
  }
  struct sigaction action{};
  action.sa_handler = wake;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

}  // namespace tessera::comm
