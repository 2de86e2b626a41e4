#pragma once

#include "comm/backend_interfaces.h"
#include "comm/gloo/call_queue.h"
#include "comm/gloo/watchdog.h"
#include "comm/gloo/work.h"

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace tessera::comm::gloo {

/// Threads that wait for sends and receives whose callers only poll.
class Watchers {
 public:
  ~Watchers() { close(); }
  /// Runs `wait` on a thread; close() ends it by aborting `inner`.
  void add(std::function<void()> wait, WorkPtr inner);
  void close();

 private:
  struct Watcher {
    std::thread thread;
    WorkPtr inner;
    std::atomic<bool> done{false};
  };

  std::mutex mutex_;
  std::list<Watcher> watchers_;
  bool closed_ = false;
};

// Note [what gloo lacks]
// c10d's gloo moves and reduces contiguous tensors of some dtypes with some operations. Here it
// gets what it can do (bytes to move, numbers it can add), and the rest is done when it completes:
// copies back to tensors that are not contiguous, averages, roundings to half types, and whole
// reductions, of what was gathered, with shm's kernels in the order of ranks. Results do not depend
// on the rank; half types are accumulated in float32 and rounded once.

// Note [staging]
// gloo gets copies of CUDA tensors in pinned host memory, and from there on a call is the same as
// one of CPU tensors: same checks, same bits. What a call reads is copied when it is issued, and
// the host waits for it: the bytes go out at once. What it writes is copied back by the thread that
// completes it, and is there when the work is complete.

/// The collectives, dtypes, operations and errors of the other backends on top of gloo.
class GlooBackend final : public c10d::Backend,
                          public FlightRecorder,
                          public GracefulShutdown,
                          public HostBackend {
 public:
  GlooBackend(const BackendRequest& request, c10::intrusive_ptr<Engine> engine);
  ~GlooBackend() override;

  const std::string getBackendName() const override { return "gloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return engine_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { engine_->setTimeout(timeout); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  void shutdown() override;
  void begin_close(Clock::time_point deadline) override;
  void abort() override;
  std::string recent() const override { return log_->recent(); }
  void await_released() override {
    if (queue_) queue_->await_released();
  }
  bool compares_calls() const override { return queue_ != nullptr; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  class Call;
  friend class Call;
  void end_all();
  /// One work for several, each a call of its own: ranks may cut a list into calls differently.
  WorkPtr join(c10d::OpType type, const std::vector<WorkPtr>& parts, Tensors outputs);
  WorkPtr point(c10d::OpType type, const char* name, Tensors& tensors, int peer, int tag);

  c10::intrusive_ptr<Engine> engine_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const Processes processes_;
  const LogPtr log_;
  const std::shared_ptr<CallQueue> queue_;  // null: calls are not checked
  const std::shared_ptr<Watchers> watchers_ = std::make_shared<Watchers>();
  uint64_t sequence_ = 0;  // of collectives: equal on all ranks
  uint64_t point_sequence_ = 0;
  uint64_t monitored_barriers_ = 0;
  std::optional<std::vector<WorkPtr>> coalescing_;
  std::optional<Clock::time_point> close_by_;
  Watchdog watchdog_;  // last: its thread uses the others
};

}  // namespace tessera::comm::gloo
