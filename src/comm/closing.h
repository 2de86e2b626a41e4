#pragma once

#include <chrono>

namespace tessera::comm {

/// A backend whose end may have to wait for its peers.
class Closing {
 public:
  virtual ~Closing() = default;
  /// Announces shutdown(), so that the groups of a rank end side by side: what is queued goes on by
  /// itself, and nothing of it is waited for after `deadline`. Returns at once.
  virtual void begin_close(std::chrono::steady_clock::time_point deadline) = 0;
};

}  // namespace tessera::comm
