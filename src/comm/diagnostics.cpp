#include "comm/diagnostics.h"

#include <tessera/comm.h>

#include "base/environment.h"
#include "base/text.h"

#include <c10/util/thread_name.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <iostream>
#include <mutex>
#include <thread>

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLateSeconds = 30;
constexpr int64_t kLongestSeconds = 100'000'000;

/// init() refuses what is no number.
std::chrono::seconds late_after() noexcept {
  static const auto seconds = [] {
    const auto text = Environment().get("TESSERA_LATE_AFTER");
    const auto chosen = (text ? parse_int(*text) : std::nullopt).value_or(kLateSeconds);
    return chosen > 0 ? std::min(chosen, kLongestSeconds) : kLongestSeconds;
  }();
  return std::chrono::seconds(seconds);
}

}  // namespace

bool is_late(Clock::time_point since) noexcept { return Clock::now() - since >= late_after(); }

void tell_late(const std::string& waiting, const std::string& awaited, Clock::time_point since,
               const std::string& what, Clock::time_point deadline) {
  const auto seconds = [](auto span) {
    return format_seconds(std::chrono::duration<double>(span).count());
  };
  std::string text = "tessera: ";
  text.append(waiting).append(" has waited ").append(seconds(Clock::now() - since));
  text.append(" for ").append(awaited).append(": ").append(what);
  text.append("; it gives up after ").append(seconds(deadline - since)).append("\n");
  std::cerr << text << std::flush;
}

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
