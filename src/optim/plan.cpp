#include "optim/plan.h"

#include <tessera/dtensor.h>

#include "base/capture.h"
#include "base/devices.h"
#include "base/storage.h"
#include "optim/rule.h"

#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/irange.h>

#include <map>
#include <mutex>

namespace tessera::optim {

namespace {

/// Python's default where neither is named.
Kernels choose_kernels(const std::vector<at::Tensor>& params, const Demand& demand) {
  if (demand.fused.value_or(false)) return Kernels::Fused;
  if (demand.foreach) return *demand.foreach ? Kernels::Foreach : Kernels::Loop;
  if (demand.fused) return Kernels::Loop;
  for (const at::Tensor& param : params)
    if (param.grad().defined() && !on_accelerator(param)) return Kernels::Loop;
  return Kernels::Foreach;
}

ParamState& state_in(
    ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& states,
    const at::Tensor& param) {
  auto& state = states[param.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<ParamState>();
  return static_cast<ParamState&>(*state);
}

/// On which no work runs: what the allocator keeps for it is for state alone.
c10::Stream state_stream(c10::Device device) {
  static std::mutex mutex;
  static auto& streams = *new std::map<c10::DeviceIndex, c10::Stream>();
  const std::lock_guard lock(mutex);
  const auto found = streams.find(device.index());
  if (found != streams.end()) return found->second;
  return streams.emplace(device.index(), pool_stream(device)).first->second;
}

/// Memory that the allocator takes from the device, not from what it keeps for other streams.
at::Tensor block_of_its_own(int64_t bytes, c10::Device device) {
  at::getDeviceAllocator(device.type())->emptyCache();
  const c10::Stream user = current_stream(device), maker = state_stream(device);
  at::Tensor block;
  {
    const c10::StreamGuard guard(maker);
    block = at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte));
    c10::Event is_there(device.type());
    is_there.record(maker);
    is_there.block(user);
  }
  block.record_stream(user);
  return block;
}

/// Moves new state on a GPU into one block, each tensor still with a storage of its own. State is
/// there for good, and it is made while gradients are: in what lies free between those, or in a
/// part of a cached block, it would keep the allocator from ever giving that memory back.
void lay_together(const std::vector<at::Tensor>& made) {
  constexpr int64_t kAlignment = 512;             // as the allocator has it
  constexpr int64_t kLeast = int64_t{32} << 20U;  // worth a block
  const capture::Hidden hidden;                   // a recorder has no part in where state lies
  const at::NoGradGuard no_grad;
  std::map<c10::DeviceIndex, std::vector<at::Tensor>> by_device;
  for (const at::Tensor& tensor : made) {
    const at::Tensor local = is_dtensor(tensor) ? DTensor::of(tensor).to_local() : tensor;
    if (local.is_cuda() && is_plain(local)) by_device[local.device().index()].push_back(local);
  }
  for (const auto& [index, tensors] : by_device) {
    std::vector<int64_t> ends{0};
    for (const at::Tensor& tensor : tensors) {
      const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
      ends.push_back(ends.back() + (bytes + kAlignment - 1) / kAlignment * kAlignment);
    }
    if (ends.back() < kLeast) continue;
    at::Tensor block;
    try {
      block = block_of_its_own(ends.back(), tensors[0].device());
    } catch (const c10::OutOfMemoryError&) {
      continue;  // it stays where it is
    }
    for (const auto i : c10::irange(tensors.size())) {
      const at::Tensor bytes = storage_bytes(tensors[i]);
      at::Tensor place = block.narrow(0, ends[i], bytes.numel()).copy_(bytes);
      tensors[i].storage().set_data_ptr({place.data_ptr(), new at::Tensor(block),
                                         [](void* held) { delete static_cast<at::Tensor*>(held); },
                                         place.device()});
    }
  }
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  return !keys.has_backend(c10::BackendComponent::PrivateUse2Bit) &&
         !keys.has_backend(c10::BackendComponent::PrivateUse3Bit);
}

bool on_accelerator(const at::Tensor& tensor) {
  switch (tensor.device().type()) {
    case c10::DeviceType::CUDA:
    case c10::DeviceType::XPU:
    case c10::DeviceType::MTIA:
    case c10::DeviceType::PrivateUse1:
      return is_plain(tensor);
    default:
      return false;
  }
}

bool GroupPlan::collect(const std::vector<at::Tensor>& params, const Demand& demand,
                        size_t state_count) {
  if (!built_ || !(demand == demand_) || members_.size() != params.size() ||
      state_count_ != state_count) {
    return false;
  }
  for (const auto i : c10::irange(params.size())) {
    const Member& member = members_[i];
    const at::Tensor& param = params[i];
    const at::Tensor& grad = param.grad();
    bool fits =
        param.unsafeGetTensorImpl() == member.param && grad.defined() == (member.bucket != kNoGrad);
    if (fits && grad.defined()) {
      fits = grad.is_sparse() == buckets_[member.bucket].sparse &&
             param.scalar_type() == member.dtype && param.device() == member.device;
      if (fits) buckets_[member.bucket].grads.push_back(grad);
    }
    if (!fits) {
      release_grads();
      return false;
    }
  }
  return true;
}

void GroupPlan::build(
    const std::vector<at::Tensor>& params, const Demand& demand, const Optimizer::Rule& rule,
    ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& state) {
  clear();
  const Kernels kernels = choose_kernels(params, demand);
  const std::vector<std::string>& names = rule.state_names();
  std::vector<at::Tensor> made;
  for (const at::Tensor& param : params) {
    const at::Tensor& grad = param.grad();
    int index = kNoGrad;
    if (grad.defined()) {
      rule.check(param, grad.is_sparse(), kernels);
      State& tensors = state_in(state, param).tensors;
      index = bucket_for(param, grad.is_sparse(), kernels, names.size());
      ParamBucket& bucket = buckets_[index];
      bucket.params.push_back(param);
      bucket.owners.push_back(&tensors);
      for (const auto i : c10::irange(names.size())) {
        if ((demand.kept >> i & 1U) == 0) continue;
        if (rule.starts_with_state() && tensors.count(names[i]) == 0) {
          const at::Tensor state = rule.new_state(names[i], param, demand);
          if (state.defined()) made.push_back(tensors[names[i]] = state);
        }
        const auto found = tensors.find(names[i]);
        bucket.state[i].push_back(found != tensors.end() ? found->second : at::Tensor());
      }
    }
    members_.push_back({param.unsafeGetTensorImpl(), index, param.scalar_type(), param.device()});
  }
  lay_together(made);
  for (ParamBucket& bucket : buckets_) bucket.grads.reserve(bucket.params.size());
  demand_ = demand;
  state_count_ = state.size();
  built_ = true;
}

int GroupPlan::bucket_for(const at::Tensor& param, bool sparse, Kernels kernels,
                          size_t state_names) {
  if (sparse) kernels = Kernels::Loop;  // list kernels know no sparse tensors
  for (const auto i : c10::irange(buckets_.size())) {
    const ParamBucket& bucket = buckets_[i];
    const at::Tensor& first = bucket.params.front();
    if (bucket.sparse == sparse && first.scalar_type() == param.scalar_type() &&
        first.device() == param.device()) {
      return static_cast<int>(i);
    }
  }
  ParamBucket& bucket = buckets_.emplace_back();
  bucket.kernels = kernels;
  bucket.sparse = sparse;
  bucket.state.resize(state_names);
  return static_cast<int>(buckets_.size() - 1);
}

void GroupPlan::release_grads() {
  for (ParamBucket& bucket : buckets_) bucket.grads.clear();
}

void GroupPlan::clear() {
  built_ = false;
  members_.clear();
  buckets_.clear();
}

}  // namespace tessera::optim
