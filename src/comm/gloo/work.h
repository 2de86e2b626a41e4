#pragma once

#include "comm/argument_checks.h"
#include "comm/device_call.h"
#include "comm/gloo/group_log.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::comm::gloo {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using LogPtr = std::shared_ptr<GroupLog>;
using DeviceCallPtr = std::shared_ptr<DeviceCall>;

class CallQueue;

/// What the works below share: a future, a record in the log, and errors that tell what happened
/// where.
class GlooWork : public c10d::Work {
 public:
  /// `device_call`: of CUDA tensors, else null.
  GlooWork(c10d::OpType type, CallRecordPtr issue, LogPtr log, Tensors outputs,
           DeviceCallPtr device_call);

  bool wait(std::chrono::milliseconds timeout) override;
  const DeviceCallPtr& device_call() const { return device_call_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  FuturePtr getFuture() override { return future_; }
  FuturePtr getFutureResult() override { return future_result_; }
  uint64_t getSequencenumber() const override { return issue_->sequence; }
  float getDuration() const override;

 protected:
  /// Runs `afterwards` unless gloo failed, then completes futures and work. Once only; never
  /// throws.
  void complete(const std::exception_ptr& gloo_error, const std::function<void()>& afterwards);

  /// What the waiting thread has to do itself.
  virtual void prepare_wait(std::chrono::milliseconds /*timeout*/) {}

  const CallRecordPtr issue_;
  const LogPtr log_;

 private:
  const Tensors outputs_;
  const DeviceCallPtr device_call_;
  const FuturePtr future_;
  const FuturePtr future_result_;
  std::atomic<int64_t> duration_us_{-1};
};

/// Complete when several of gloo's collectives are and what follows them has run, on the thread
/// that ends the last one.
class CollectiveWork final : public GlooWork {
 public:
  /// `queue`: where it starts; null if it is not checked.
  CollectiveWork(c10d::OpType type, CallRecordPtr issue, LogPtr log, Tensors outputs,
                 DeviceCallPtr device_call, std::shared_ptr<CallQueue> queue = nullptr)
      : GlooWork(type, std::move(issue), std::move(log), std::move(outputs),
                 std::move(device_call)),
        queue_(std::move(queue)) {}

  /// From here on it counts as under way. `self` keeps the work alive until it has ended.
  static void begin(const c10::intrusive_ptr<CollectiveWork>& self,
                    std::function<void()> afterwards);
  /// Then one of these, once.
  static void follow(const c10::intrusive_ptr<CollectiveWork>& self,
                     const std::vector<WorkPtr>& parts);
  void end(const std::exception_ptr& error);

  const CallRecordPtr& issue() const { return issue_; }

  // --- for the queue, under its lock
  bool has_started() const { return has_started_; }
  void mark_started() { has_started_ = true; }

 private:
  void prepare_wait(std::chrono::milliseconds timeout) override;
  void end_part(const std::exception_ptr& error);
  void complete_once(const std::exception_ptr& error);

  const std::shared_ptr<CallQueue> queue_;
  bool has_started_ = false;
  std::atomic<size_t> open_parts_{0};
  std::atomic<bool> is_ending_{false};
  std::function<void()> afterwards_;
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

/// A send or receive. gloo completes it only inside a wait: that of the caller or, once somebody
/// polls or asks for the future, that of a thread which the backend joins.
class PointWork final : public GlooWork {
 public:
  using Watchers = std::function<void(std::function<void()>)>;  // runs its argument on a thread
  PointWork(c10d::OpType type, CallRecordPtr issue, LogPtr log, Tensors outputs,
            DeviceCallPtr device_call, WorkPtr inner, std::function<void()> afterwards,
            Watchers watch);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override { inner_->abort(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  FuturePtr getFuture() override;
  FuturePtr getFutureResult() override;

 private:
  bool claim() { return !claimed_.exchange(true); }
  void run(std::chrono::milliseconds timeout);
  void watch();

  const WorkPtr inner_;
  const std::function<void()> afterwards_;
  const Watchers watchers_;
  std::atomic<bool> claimed_{
      false};  // gloo counts completions: only one thread may wait for this one
};

}  // namespace tessera::comm::gloo
