#include "checkpoint/kept_results.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace tessera::recompute {
namespace {

/// The same memory and version, but unknown to autograd, which writes into the result it gets.
at::Tensor share(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                  /*allow_tensor_metadata_change=*/true));
}

c10::IValue share(const c10::IValue& value) {
  if (value.isTensor()) return share(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> copy;
    for (const at::Tensor& tensor : value.toTensorVector()) copy.push_back(share(tensor));
    return copy;
  }
  return value;
}

int64_t version_of(const c10::IValue& value) {
  int64_t version = 0;
  const auto add = [&version](const at::Tensor& tensor) {
    if (tensor.defined()) version += tensor._version();
  };
  if (value.isTensor()) add(value.toTensor());
  if (value.isTensorList()) std::ranges::for_each(value.toTensorVector(), add);
  return version;
}

/// Views share memory with an argument and writing operators have to write: both always run.
bool can_be_kept(const c10::FunctionSchema& schema) {
  return !schema.is_mutable() && !schema.returns().empty() &&
         std::ranges::none_of(schema.returns(),
                              [](const c10::Argument& result) { return result.alias_info(); });
}

std::vector<at::Device> devices_of(const torch::jit::Stack& values) {
  std::vector<at::Device> devices;
  for (const auto& value : values) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto device = value.toTensor().device();
    if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
  }
  return devices;
}

}  // namespace

void KeptResults::run_and_keep(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  op.callBoxed(stack);
  if (!can_be_kept(op.schema())) return;
  auto& call = calls_[op].emplace_back();
  const auto decision = policy_(op.operator_name());
  if (decision != CheckpointPolicy::MustSave && decision != CheckpointPolicy::PreferSave) return;
  const auto results = torch::jit::last(stack, op.schema().returns().size());
  for (const auto& result : results) call.results.push_back({share(result), version_of(result)});
  // Whoever draws next in a recomputation that skips this operator must draw what it drew.
  if (op.hasTag(at::Tag::nondeterministic_seeded))
    call.random_after = RandomState::of(devices_of(results.vec()));
}

void KeptResults::take(const c10::OperatorHandle& op, const Call& call, torch::jit::Stack& stack) {
  for (const auto& result : call.results) {
    TORCH_CHECK(version_of(result.value) == result.version,
                "checkpoint: expected the kept result of ", op.operator_name(),
                " to be unchanged until backward, but it has been written to in place; recompute "
                "this operator, or use the one that is not in place");
  }
  torch::jit::drop(stack, op.schema().arguments().size());
  for (const auto& result : call.results) stack.push_back(share(result.value));
  if (call.random_after && RunState::replays_random()) call.random_after->restore();
}

void KeptResults::Reader::take_or_run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (!can_be_kept(op.schema())) return op.callBoxed(stack);
  const auto index = next_[op]++;
  const auto calls = results_.calls_.find(op);
  // Called more often than by the forward: the check of what is saved tells if that matters.
  if (calls == results_.calls_.end() || index >= calls->second.size()) return op.callBoxed(stack);
  auto& call = calls->second[index];
  if (call.results.empty()) return op.callBoxed(stack);
  take(op, call, stack);
  // From here on the recomputed graph owns the result; a later backward, if any, runs the operator.
  if (!torch::autograd::get_current_graph_task_keep_graph()) call = {};
}

}  // namespace tessera::recompute
