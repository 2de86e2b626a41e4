#pragma once

#include <c10/core/Event.h>

#include <optional>

namespace tessera::train {

/// Seconds of a clock that only goes forward.
double now();

/// When a device has done all that this thread has issued to its current stream so far. On the CPU
/// that is when the object is made.
class Moment {
 public:
  explicit Moment(c10::Device device);

  bool has_come() const;
  void wait() const;
  /// Both have come.
  double seconds_since(const Moment& earlier) const;

 private:
  std::optional<c10::Event> event_;  // none on the CPU
  double made_at_;
};

}  // namespace tessera::train
