#pragma once

#include <atomic>
#include <chrono>
#include <string>

namespace tessera::comm {

/// Says once, on standard error, that one wait is long: nothing is wrong yet, but a user who looks
/// should see who is waited for. Any thread may ask.
class LateNotice {
 public:
  using Clock = std::chrono::steady_clock;

  /// Whether the wait that began at `since` is due to be told of: 30 s old (TESSERA_LATE_AFTER in
  /// seconds; 0: never), and not told of by this object. One more look at the clock is all it
  /// costs.
  bool is_due(Clock::time_point since);

 private:
  std::atomic<Clock::time_point> told_{};
};

/// "tessera: rank 0 waits for rank 1 since 30 s: barrier #1 in group 'world'; it gives up after …".
void tell_late(const std::string& waiting, const std::string& awaited,
               LateNotice::Clock::time_point since, const std::string& what,
               LateNotice::Clock::time_point deadline);

}  // namespace tessera::comm
