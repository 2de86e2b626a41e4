#pragma once

#include "comm/shm/work.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace tessera::comm::shm {

/// Runs a group's collectives in the order of their issue, one at a time, on whichever thread is at
/// hand: the one that waits for a result, else one worker thread, started when first needed. Small
/// ones are put where the peers look at the moment of issue, so a rank that goes on computing holds
/// nobody up.
class Executor {
 public:
  explicit Executor(const BackendRequest& request) : channel_(request) {}
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  Channel& channel() { return channel_; }

  /// In the background unless `wait`.
  void submit(const c10::intrusive_ptr<ShmWork>& work, bool wait);
  /// Runs what is queued up to `work`, or waits for whoever does. Throws after `timeout` (0: none
  /// but the work's own).
  void run_until_done(ShmWork& work, std::chrono::milliseconds timeout);
  /// Returns when nothing that is done is held here any more.
  void await_released();
  /// Makes sure that what is queued gets done without anybody waiting.
  void nudge();
  /// Completes what is queued and ends the worker. Nothing may be submitted afterwards.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  bool starts_now(ShmWork& work);
  /// Whether so much has started without being finished that peers may wait for it.
  bool holds_peers_up() const;
  void run_front(Lock& lock);
  /// The time is the caller's patience, not the collective's: the worker runs it on.
  void wait_until_done(ShmWork& work, std::chrono::milliseconds timeout);
  void work_loop();

  Channel channel_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<ShmWork>> queue_;
  bool running_ = false;          // somebody executes the front of the queue
  const ShmWork* run_ = nullptr;  // what is executed
  int told_ = 0;                  // works whose futures are told: done, and held
  bool worker_wanted_ = false;
  bool closed_ = false;
  std::thread worker_;
};

}  // namespace tessera::comm::shm
