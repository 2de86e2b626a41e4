#pragma once

#include <tessera/comm.h>

namespace tessera::comm {

/// Whether this process has cores that its ranks' computation leaves free, so that collectives of
/// the group can go on in the background without taking time from it.
bool has_cores_to_spare(const Group& group);

/// Whether its ranks exchange CPU tensors in memory that they share, in turn with computation: then
/// many small messages in the middle of that are no slower than a large one behind it.
bool takes_turns(const Group& group);

/// While it lives, collectives in shared memory that this thread launches are done when the launch
/// returns.
class ForegroundScope {
 public:
  ForegroundScope();
  ~ForegroundScope();
  ForegroundScope(const ForegroundScope&) = delete;
  ForegroundScope& operator=(const ForegroundScope&) = delete;

  /// Whether one is open in this thread.
  static bool is_open();

 private:
  bool before_;
};

}  // namespace tessera::comm
