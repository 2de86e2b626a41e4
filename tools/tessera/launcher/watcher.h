#pragma once

#include "launcher/descriptor.h"

#include <sys/types.h>

namespace tessera::launcher {

/// A small process that outlives a launcher killed by SIGKILL, to kill the process groups of its
/// ranks. The ranks themselves die with the launcher anyway (PR_SET_PDEATHSIG); what they have
/// started would not.
class Watcher {
 public:
  /// Forks. To be made before anything the watcher should not hold open, and after the SignalInbox,
  /// whose blocked signals it inherits: what ends the launcher in an orderly way must not end it.
  Watcher();
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  pid_t pid() const { return pid_; }

  /// Each rank writes its pid here before it executes its program (see enrol), so that no moment
  /// is left in which it could start others unseen.
  int fd() const { return pipe_.get(); }

  /// The groups enrolled so far have been ended; their numbers may belong to others soon.
  void forget_groups();

 private:
  Descriptor pipe_;  // its end, by close or by death of the launcher, is the watcher's signal
  pid_t pid_ = -1;
};

/// In a forked child: hands the calling process, the leader of its group, to the watcher.
void enrol(int watcher_fd) noexcept;

}  // namespace tessera::launcher
