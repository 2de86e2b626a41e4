#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace tessera::comm {

/// Equal for processes that can map each other's memory: one boot of a kernel, one PID namespace,
/// one user.
std::string host_identity();
/// Equal for processes that reach each other by the loopback device, on one host.
std::string network_identity();
/// For messages.
std::string host_name();

/// Whether a process of that number runs, and as another user than this one.
bool is_of_another_user(int pid);

/// Tells whether another process still runs, by a pidfd: exact even when the pid is reused or the
/// dead process has not been reaped. One descriptor per peer process, shared by all groups.
class PeerProcess {
 public:
  static std::shared_ptr<PeerProcess> watch(int pid);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  bool has_exited() const;
  /// Stopped by SIGSTOP or a debugger, and for how long, as far as looks once a second can tell;
  /// none: it runs.
  std::optional<std::chrono::milliseconds> stopped_for() const;
  /// "rank 1 (process 7) has been stopped for 31 s (SIGSTOP or a debugger); …", where `name` is
  /// "rank 1", once that is longer than a stopped peer is waited for; none: it is not. Tells the
  /// user of the stop some time before, once, unless `waiting` ("rank 0") is empty.
  std::optional<std::string> find_stop(const std::string& name, const std::string& waiting) const;
  int pid() const { return pid_; }

 private:
  explicit PeerProcess(int pid);
  bool claim_telling() const;

  int pid_;
  mutable std::mutex mutex_;  // guards what follows
  mutable std::chrono::steady_clock::time_point last_look_{};
  mutable std::optional<std::chrono::steady_clock::time_point> stopped_since_;
  mutable bool is_told_ = false;
  int descriptor_;  // -1: the process was gone already, or this is the own process (never exited)
};

/// How long a peer that is stopped is waited for; 0: as long as any other. For the whole process.
void set_stopped_timeout(std::chrono::milliseconds timeout);

}  // namespace tessera::comm
