#pragma once

#include "comm/backends.h"
#include "comm/gloo/group_log.h"

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace tessera::comm::gloo {

/// Looks after what gloo waits for and can't see: peers on this host that are stopped, hosts that
/// are lost. On a thread of its own, once a second.
class Watchdog {
 public:
  /// `give_up` ends what is under way; the log knows the cause then. Called once, at most.
  Watchdog(const BackendRequest& request, std::shared_ptr<GroupLog> log,
           std::function<void()> give_up);
  ~Watchdog() { close(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  void close();

 private:
  void run();
  std::optional<std::string> find_problem() const;

  const int rank_;
  const Processes processes_;
  const std::vector<int> world_ranks_;
  std::shared_ptr<Heartbeat> heartbeat_;  // until it is closed
  const std::shared_ptr<GroupLog> log_;
  const std::function<void()> give_up_;
  std::mutex mutex_;
  std::condition_variable closing_;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm::gloo
