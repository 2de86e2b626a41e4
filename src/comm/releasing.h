#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera::comm {

/// A backend of ours, as the compiler sees it: its threads may hold a tensor a moment longer than
/// those who waited for it.
class Releasing {
 public:
  virtual ~Releasing() = default;
  /// Returns when no collective that is complete holds its tensors any more. Does not wait for
  /// those under way.
  virtual void await_released() = 0;
  /// Note [call check]: whether ranks compare what they call before data moves; users may turn it
  /// off.
  virtual bool compares_calls() const = 0;
};

/// Of all backends of the group.
void await_released(c10d::ProcessGroup& group);

}  // namespace tessera::comm
