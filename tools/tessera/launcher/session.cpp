#include "launcher/session.h"

#include <poll.h>

#include <algorithm>
#include <cstdint>

namespace tessera::launcher {

int Session::flush() {
  output.write_some();
  while (output.has_pending()) {
    std::vector<pollfd> fds{{signals.fd(), POLLIN, 0}};
    output.add_pending(fds);
    ::poll(fds.data(), fds.size(), -1);
    while (const auto signal = signals.next()) {
      if (ends_job(*signal)) return *signal;
    }
    output.write_some();
  }
  return 0;
}

int Session::pause(std::chrono::duration<double> time) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(time);
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
    std::vector<pollfd> fds{{signals.fd(), POLLIN, 0}};
    output.add_pending(fds);
    ::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30)));
    while (const auto signal = signals.next()) {
      if (ends_job(*signal)) return *signal;
    }
    output.write_some();
    if (left <= 0) return 0;
  }
}

}  // namespace tessera::launcher
