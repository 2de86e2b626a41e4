#pragma once

#include "comm/argument_checks.h"
#include "comm/backend_interfaces.h"
#include "comm/device_call.h"
#include "comm/shm/executor.h"
#include "comm/shm/point_to_point.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <exception>
#include <memory>

namespace tessera::comm::shm {

using c10d::Work;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// c10d's interface to collectives in shared memory. Checks arguments, makes tensors contiguous and
/// queues.
class ShmBackend final : public c10d::Backend,
                         public FlightRecorder,
                         public GracefulShutdown,
                         public HostBackend {
 public:
  explicit ShmBackend(const BackendRequest& request);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }
  c10d::ErrorType getError() override;
  void shutdown() override;
  void begin_close(Clock::time_point deadline) override;
  void abort() override { shutdown(); }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

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
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  std::string recent() const override { return executor_->channel().recent(); }
  void await_released() override { executor_->await_released(); }
  bool compares_calls() const override { return executor_->channel().checks_calls(); }
  bool shares_memory() const override { return true; }

  Channel& channel() { return executor_->channel(); }
  /// Collectives that this rank has issued.
  uint64_t issued() const { return issued_.load(); }

 private:
  class Call;
  friend class Call;
  void add_all_gather(Call& call, const at::Tensor& input, const at::Tensor& output);
  void add_reduce_scatter(Call& call, const at::Tensor& input, const at::Tensor& output,
                          const c10d::ReduceOp& op);
  void add_all_reduce(Call& call, const at::Tensor& tensor, const c10d::ReduceOp& op);
  /// Checks of one call; if it throws, what was being coalesced is dropped, so that later calls are
  /// not swallowed.
  class Check : public ArgumentChecks {
   public:
    Check(ShmBackend& backend, const char* collective)
        : ArgumentChecks("shm", collective, backend.rank_, backend.size_,
                         supports(c10::kCUDA, c10::kFloat) ? Devices::CpuAndCuda : Devices::Cpu),
          backend_(backend) {}
    ~Check();

   private:
    ShmBackend& backend_;
    int exceptions_ = std::uncaught_exceptions();
  };
  Check arguments(const char* collective) { return {*this, collective}; }
  /// The slots on the device, Note [slots on a device]; null if ranks can't share its memory. The
  /// first call is collective and waits for all ranks.
  Medium* device_medium(const char* collective, c10::Device device);
  const c10::Stream& device_stream(c10::Device device);
  at::Tensor copy_to_host(const at::Tensor& tensor);
  WorkPtr post(P2PQueue::Message message);
  WorkPtr receive(const char* caller, Tensors& tensors, int source, int tag);
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds given) const;

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<P2PQueue> queue_;
  std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> issued_{0};
  std::unique_ptr<Call> coalescing_;  // between startCoalescing and endCoalescing
  HostMedium host_medium_;
  std::optional<c10::Stream> device_stream_;
  bool has_met_on_device_ = false;
  std::shared_ptr<Medium> device_medium_;
};

}  // namespace tessera::comm::shm
