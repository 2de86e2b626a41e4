#pragma once

#include "comm/argument_checks.h"
#include "comm/backend_interfaces.h"
#include "comm/call_check.h"
#include "comm/nccl/nccl_work.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <exception>
#include <functional>
#include <set>

namespace tessera::comm::nccl {

using Engine = c10d::ProcessGroupNCCL;
using EnginePtr = c10::intrusive_ptr<Engine>;

/// c10d's NCCL with the checks, errors and records of the other backends. Nothing of CUDA or NCCL
/// is set up before the first call, unless the program bound the rank to its device.
class NcclBackend final : public c10d::Backend,
                          public FlightRecorder,
                          public GracefulShutdown,
                          public Capturable {
 public:
  explicit NcclBackend(const BackendRequest& request);
  ~NcclBackend() override;

  /// Meets the peers and makes the communicator.
  void connect_now();

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  void shutdown() override;
  void begin_close(Clock::time_point deadline) override { close_by_ = deadline; }
  void abort() override;
  std::string recent() const override { return log_->recent(); }
  void note_capture(std::weak_ptr<CapturedGraph> graph, int64_t calls) override;
  void note_replay(int64_t calls) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
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
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;

 private:
  /// One call, for messages and for the watch.
  struct Call {
    c10d::OpType type;
    Descriptor descriptor;
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
    bool in_background = true;  // else the current stream waits for it at once
    int peer = -1;
    int64_t count = -1;                             // of coalesced calls; -1: it is one
    std::optional<Tensors> outputs = std::nullopt;  // what the caller passed, if not what NCCL got
  };
  struct Coalesced {
    int64_t count = 0;
    int peer = -1;  // of a send or receive among them
    bool has_collectives = false;
  };
  using Start = std::function<WorkPtr(Engine&)>;

  /// Checks of one call; if it throws, what was being coalesced ends there, so that later calls are
  /// not swallowed.
  class Check : public ArgumentChecks {
   public:
    Check(NcclBackend& backend, const char* name)
        : ArgumentChecks("nccl", name, backend.rank_, backend.size_, Devices::Cuda),
          backend_(backend) {}
    ~Check();

   private:
    NcclBackend& backend_;
    int exceptions_ = std::uncaught_exceptions();
  };
  Check check(const char* name);
  void drop_coalesced();
  WorkPtr run(Call call, const Start& start);
  WorkPtr point(c10d::OpType type, const char* name, Tensors& tensors, int peer, int tag);
  /// A communicator is made at the first call, which would wait for a missing peer without a word.
  void meet(const Call& call);
  void meet_peer(int peer);
  Engine& engine();
  /// Ends the communicator within the time that is left for it.
  void end(const std::function<void(Engine&)>& how);

  const BackendRequest request_;
  const std::shared_ptr<GroupLog> log_;
  std::chrono::milliseconds timeout_;
  EnginePtr engine_;                 // null before the first call
  std::shared_ptr<Watchdog> watch_;  // likewise
  bool has_met_ = false;
  std::set<int> met_peers_;
  bool has_ended_ = false;
  std::optional<Coalesced> coalesced_;  // between startCoalescing and endCoalescing
  uint64_t sequence_ = 0;               // of collectives: equal on all ranks
  uint64_t point_sequence_ = 0;
  uint64_t captured_ = 0;        // calls of captures
  uint64_t captured_known_ = 0;  // of those, the ones in graphs_
  std::vector<std::weak_ptr<CapturedGraph>> graphs_;
  std::optional<Clock::time_point> close_by_;
};

}  // namespace tessera::comm::nccl
