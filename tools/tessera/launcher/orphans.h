#pragma once

#include <sys/types.h>

#include <set>
#include <vector>

namespace tessera::launcher {

/// Processes that ranks started and whose parents have ended. They become children of the launcher,
/// which asks for that (PR_SET_CHILD_SUBREAPER), so that none is left behind, in whatever session
/// or group it hides.
class Orphans {
 public:
  /// Children the launcher has already, from a shell that became it by exec, are not its to end.
  Orphans();

  /// The launcher's own children, which are no orphans: ranks and the watcher.
  void exclude(pid_t pid) { excluded_.insert(pid); }
  void include(pid_t pid) { excluded_.erase(pid); }

  struct Orphan {
    pid_t pid;
    pid_t group;
  };

  /// Takes leave of those that have ended and returns the others.
  std::vector<Orphan> reap();

  /// Ends all of them and all they leave; waits until they are gone.
  void kill_all();

 private:
  std::set<pid_t> excluded_;
};

}  // namespace tessera::launcher
