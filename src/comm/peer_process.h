#pragma once

#include <memory>

namespace tessera::comm {

/// Tells whether another process still runs, by a pidfd: exact even when the pid is reused or the
/// dead process has not been reaped. One descriptor per peer process, shared by all groups.
class PeerProcess {
 public:
  static std::shared_ptr<PeerProcess> watch(int pid);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  bool has_exited() const;
  int pid() const { return pid_; }

 private:
  explicit PeerProcess(int pid);
  int pid_;
  int descriptor_;  // -1: the process was gone already, or this is the own process (never exited)
};

}  // namespace tessera::comm
