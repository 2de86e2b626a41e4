// One process that stands for a world of any size. Nobody else exists, so every collective is done
// at once, with results of the right shape computed as if all ranks held what this one holds:
// reductions leave the tensor alone (neither sum nor average multiplies it), gathering repeats it,
// scattering keeps this rank's own part, broadcast and receive leave the tensor as it is. PyTorch's
// FakeProcessGroup does the same.
#include "comm/argument_checks.h"
#include "comm/backend_interfaces.h"
#include "comm/backends.h"
#include "comm/completed_work.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

namespace tessera::comm::fake {
namespace {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class FakeBackend final : public c10d::Backend, public HostBackend {
 public:
  explicit FakeBackend(const BackendRequest& request)
      : Backend(request.rank, request.size), timeout_(request.timeout) {}

  const std::string getBackendName() const override { return "fake"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("fake", timeout_);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void await_released() override {}
  bool compares_calls() const override { return true; }  // there is nobody to differ
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return done(OpType::COALESCED, {}); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const auto check = checks("broadcast");
    check.only(tensors);
    check.check_root(opts.rootRank);
    return done(OpType::BROADCAST, tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    checks("all_reduce").only(tensors);
    return done(OpType::ALLREDUCE, tensors);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions&) override {
    for (const auto& tensor : tensors) checks("all_reduce_coalesced").check_tensor(tensor);
    return done(OpType::ALLREDUCE_COALESCED, tensors);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const auto check = checks("reduce");
    check.only(tensors);
    check.check_root(opts.rootRank);
    return done(OpType::REDUCE, tensors);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    const auto check = checks("all_gather");
    const auto& input = check.only(inputs);
    check.check_parts("output", check.only(outputs), input, /*uneven=*/false);
    for (auto& output : outputs[0]) copy(output, input);
    return done(OpType::ALLGATHER, outputs[0]);
  }

  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions&) override {
    const auto check = checks("all_gather_coalesced");
    for (auto& list : outputs) {  // by rank, then by input
      check.check_pairs(list, inputs);
      for (size_t i = 0; i < inputs.size(); ++i) copy(list[i], inputs[i]);
    }
    return done(OpType::ALLGATHER_COALESCED, {});
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    repeat(checks("all_gather_into_tensor"), output, input);
    return done(OpType::_ALLGATHER_BASE, {output});
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions&) override {
    const auto check = checks("all_gather_into_tensor_coalesced");
    check.check_pairs(outputs, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) repeat(check, outputs[i], inputs[i]);
    return done(OpType::COALESCED, outputs);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    const auto check = checks("gather");
    const auto& input = check.only(inputs);
    check.check_root_list("output", outputs, opts.rootRank, input);
    if (rank_ != opts.rootRank) return done(OpType::GATHER, {});
    for (auto& output : outputs[0]) copy(output, input);
    return done(OpType::GATHER, outputs[0]);
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& opts) override {
    const auto check = checks("scatter");
    const auto& output = check.only(outputs);
    check.check_root_list("input", inputs, opts.rootRank, output);
    if (rank_ == opts.rootRank) copy(output, inputs[0][rank_]);
    return done(OpType::SCATTER, outputs);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions&) override {
    const auto check = checks("reduce_scatter");
    const auto& output = check.only(outputs);
    check.check_parts("input", check.only(inputs), output, /*uneven=*/false);
    copy(output, inputs[0][rank_]);
    return done(OpType::REDUCE_SCATTER, outputs);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions&) override {
    keep_part(checks("reduce_scatter_tensor"), output, input);
    return done(OpType::_REDUCE_SCATTER_BASE, {output});
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions&) override {
    const auto check = checks("reduce_scatter_tensor_coalesced");
    check.check_pairs(outputs, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) keep_part(check, outputs[i], inputs[i]);
    return done(OpType::COALESCED, outputs);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    const auto check = checks("all_to_all_single");
    check.check_tensor(output);
    check.check_tensor(input);
    const auto to = check.rows("output", output, output_splits);
    const auto from = check.rows("input", input, input_splits);
    check.check_own_part(from[rank_], to[rank_]);
    const auto outputs = at::split_with_sizes(output, to, 0);
    const auto inputs = at::split_with_sizes(input, from, 0);
    // Each peer sends what this rank would send it, cut or repeated to the size that is expected of
    // it.
    for (int peer = 0; peer < size_; ++peer) {
      for (int64_t at = 0; from[peer] > 0 && at < to[peer]; at += from[peer]) {
        const auto count = std::min(from[peer], to[peer] - at);
        copy(outputs[peer].narrow(0, at, count), inputs[peer].narrow(0, 0, count));
      }
    }
    return done(OpType::ALLTOALL_BASE, {output});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    const auto check = checks("all_to_all");
    check.check_pairs(outputs, inputs);
    for (const auto& input : inputs) check.check_tensor(input);
    check.check_parts("output", outputs, inputs.at(0), /*uneven=*/true);
    for (int peer = 0; peer < size_; ++peer) {
      if (outputs[peer].numel() == inputs[peer].numel()) copy(outputs[peer], inputs[peer]);
    }
    return done(OpType::ALLTOALL, outputs);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override { return done(OpType::BARRIER, {}); }
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override {}
  WorkPtr send(Tensors& tensors, int destination, int) override {
    return pass(OpType::SEND, "send", tensors, destination);
  }
  WorkPtr recv(Tensors& tensors, int source, int) override {
    return pass(OpType::RECV, "recv", tensors, source);
  }
  WorkPtr recvAnysource(Tensors& tensors, int) override {
    return pass(OpType::RECVANYSOURCE, "recv", tensors, 0);
  }

 private:
  ArgumentChecks checks(const char* name) const {
    return {"fake", name, rank_, size_, Devices::Any};
  }
  WorkPtr done(OpType type, Tensors outputs) {
    return completed_work(type, std::move(outputs), ++sequence_);
  }

  WorkPtr pass(OpType type, const char* name, const Tensors& tensors, int peer) {
    checks(name).only(tensors);
    checks(name).check_root(peer);
    return done(type, tensors);
  }

  /// Like a real backend, unseen by autograd.
  static void copy(const at::Tensor& to, const at::Tensor& from) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from.reshape(to.sizes()));
  }

  void repeat(const ArgumentChecks& check, const at::Tensor& output,
              const at::Tensor& input) const {
    check.check_whole(output, input);
    copy(output, input.reshape({1, -1}).expand({size_, input.numel()}));
  }

  void keep_part(const ArgumentChecks& check, const at::Tensor& output,
                 const at::Tensor& input) const {
    check.check_whole(input, output);
    copy(output, input.reshape({size_, output.numel()}).select(0, rank_));
  }

  std::chrono::milliseconds timeout_;
  uint64_t sequence_ = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) {
  return c10::make_intrusive<FakeBackend>(request);
}

bool available() { return true; }

bool supports(c10::DeviceType, c10::ScalarType) { return true; }

}  // namespace tessera::comm::fake
