#include "checkpoint/kept_results.h"

#include "base/call_boxed.h"

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <functional>

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

void for_each_tensor(const c10::IValue& value,
                     const std::function<void(const at::Tensor&)>& visit) {
  const auto visit_defined = [&visit](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
  };
  if (value.isTensor()) visit_defined(value.toTensor());
  if (value.isTensorList()) std::ranges::for_each(value.toTensorVector(), visit_defined);
}

int64_t version_of(const c10::IValue& value) {
  int64_t version = 0;
  for_each_tensor(value, [&version](const at::Tensor& tensor) { version += tensor._version(); });
  return version;
}

/// Null for tensors of other kinds, whose memory is not known.
const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

bool has_memory(const c10::IValue& value, const c10::StorageImpl* memory) {
  bool found = false;
  for_each_tensor(value, [&](const at::Tensor& tensor) { found |= memory_of(tensor) == memory; });
  return found;
}

c10::IValue copy(const c10::IValue& value) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (value.isTensor()) return value.toTensor().clone();
  c10::List<at::Tensor> copies;
  for (const at::Tensor& tensor : value.toTensorVector())
    copies.push_back(tensor.defined() ? tensor.clone() : tensor);
  return copies;
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

void KeptResults::keep(Call& call, const c10::IValue& result) {
  call.results.push_back({share(result), version_of(result)});
  for_each_tensor(result, [this](const at::Tensor& tensor) { memory_.insert(memory_of(tensor)); });
}

void KeptResults::make_way(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(stack, schema.arguments().size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    for_each_tensor(arguments[i], [this](const at::Tensor& written) {
      if (!memory_.contains(memory_of(written))) return;
      for (auto& [kept_op, calls] : calls_) {
        for (auto& call : calls) {
          for (auto& result : call.results) {
            if (!has_memory(result.value, memory_of(written))) continue;
            result.value = copy(result.value);
            result.version = version_of(result.value);
          }
        }
      }
      memory_.erase(memory_of(written));
    });
  }
}

void KeptResults::run_and_keep(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (op.schema().is_mutable()) make_way(op, stack);
  call_boxed(op, stack);
  if (!can_be_kept(op.schema())) return;
  auto& call = calls_[op].emplace_back();
  const auto decision = policy_(op.operator_name());
  if (decision != CheckpointPolicy::MustSave && decision != CheckpointPolicy::PreferSave) return;
  const auto results = torch::jit::last(stack, op.schema().returns().size());
  if (std::ranges::any_of(results, [](const auto& value) { return has_memory(value, nullptr); }))
    return;
  for (const auto& result : results) keep(call, result);
  // Whoever draws next in a recomputation that skips this operator must draw what it drew.
  if (op.hasTag(at::Tag::nondeterministic_seeded))
    call.random_after = RandomState::of(devices_of(results.vec()));
}

void KeptResults::take(const c10::OperatorHandle& op, const Call& call, torch::jit::Stack& stack) {
  for (const auto& result : call.results) {
    TORCH_CHECK(version_of(result.value) == result.version,
                "checkpoint: expected the kept result of ", op.operator_name(),
                " to be unchanged until backward, but it has been written to in place after the "
                "call; recompute this operator, or use the one that is not in place");
  }
  torch::jit::drop(stack, op.schema().arguments().size());
  for (const auto& result : call.results) stack.push_back(share(result.value));
  if (call.random_after && RunState::replays_random()) call.random_after->restore();
}

void KeptResults::Reader::take_or_run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (op.schema().is_mutable()) results_.make_way(op, stack);
  if (!can_be_kept(op.schema())) return call_boxed(op, stack);
  const auto index = next_[op]++;
  const auto calls = results_.calls_.find(op);
  // Called more often than by the forward: the check of what is saved tells if that matters.
  if (calls == results_.calls_.end() || index >= calls->second.size()) return call_boxed(op, stack);
  auto& call = calls->second[index];
  if (call.results.empty()) return call_boxed(op, stack);
  take(op, call, stack);
  // From here on the recomputed graph owns the result; a later backward, if any, runs the operator.
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    call = {};
    return;
  }
  // The recomputation may write to what it was given.
  for (const auto& result : call.results) {
    for_each_tensor(result.value, [this](const at::Tensor& tensor) {
      results_.memory_.insert(memory_of(tensor));
    });
  }
}

}  // namespace tessera::recompute
