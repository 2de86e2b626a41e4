#pragma once

#include "comm/device_call.h"
#include "comm/shm/collective.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::comm::shm {

class Executor;

/// A collective, or several that belong together, with the tensors it keeps alive. wait() runs it
/// on the calling thread if nobody has begun it yet.
class ShmWork final : public c10d::Work {
 public:
  struct Parts {
    c10d::OpType type;
    const char* title;                // as the profiler shows it
    std::vector<at::Tensor> inputs;   // for the profiler
    std::vector<at::Tensor> outputs;  // what the future holds
    std::vector<CollectivePtr> collectives;
    std::vector<at::Tensor> kept;      // memory the collectives use
    std::function<void()> afterwards;  // copies results to where the caller wants them
    std::vector<c10::intrusive_ptr<c10d::Work>>
        messages;                        // coalesced with them; they run by themselves
    std::shared_ptr<DeviceCall> device;  // null: all of it is done by the host
  };
  ShmWork(int rank, Parts parts, std::shared_ptr<Executor> executor);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  std::vector<at::Tensor> result() override { return parts_.outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;
  float getDuration() const override;

  // --- for the executor
  std::vector<CollectivePtr>& collectives() { return parts_.collectives; }
  /// Starts what can start without waiting; true if all of it has.
  bool try_start(Channel& channel);
  bool has_started() const;
  /// Does it and marks it done; tell_future() then completes the futures, with no lock or role
  /// held, because their callbacks may issue collectives.
  void run(Channel& channel);
  void tell_future();
  bool is_done() const;
  /// "all_reduce #7 (float32, 4 KiB, sum)"; without the number before it has started.
  std::string describe() const;

 private:
  void end(std::exception_ptr exception);

  Parts parts_;
  std::shared_ptr<Executor> executor_;
  std::vector<Channel::Record> records_;
  mutable std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> future_result_;
  bool future_told_ = false;
  bool result_told_ = false;
  std::atomic<bool> done_{false};
  std::atomic<uint64_t> sequence_{0};
  Clock::duration duration_{};
};

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
