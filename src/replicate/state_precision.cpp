// What options change of parameters and of how their gradients travel: mixed precision, delayed
// averages.
#include "replicate/hook_futures.h"
#include "replicate/state_impl.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::replication {

/// Indices of the parameters that are averaged together, with the one that sends them at the end.
std::vector<size_t> State::delayed_in(const ManagedParameters& parameters) const {
  std::vector<size_t> found;
  auto names = options_.delay_all_reduce_named_params;
  if (names.empty()) return found;
  std::erase(names, options_.param_to_hook_all_reduce);
  names.push_back(options_.param_to_hook_all_reduce);
  for (const auto& name : names) {
    const auto place = std::find(parameters.names.begin(), parameters.names.end(), name);
    TORCH_CHECK_VALUE(place != parameters.names.end(),
                      "replicate: expected names of parameters "
                      "that are averaged in delay_all_reduce_named_params and "
                      "param_to_hook_all_reduce, got '",
                      name, "', which ", nn::name_of(module_),
                      " has not, or which is frozen or ignored");
    found.push_back(static_cast<size_t>(place - parameters.names.begin()));
    const auto& one = parameters.tensors[found.back()];
    const auto& first = parameters.tensors[found.front()];
    TORCH_CHECK_VALUE(one.scalar_type() == first.scalar_type() && one.device() == first.device() &&
                          !parameters.is_sparse[found.back()],
                      "replicate: expected delay_all_reduce_named_params of one dtype and device, "
                      "with dense gradients, as they travel in one message, but '",
                      name, "' is not like '", names.front(), "'; leave it out");
  }
  return found;
}

void State::begin_precision(const ManagedParameters& all) {
  if (!options_.mixed_precision) return;
  const auto& dtypes = *options_.mixed_precision;
  if (dtypes.buffer_dtype) cast_buffers(collect_buffers(module_, ignored_), *dtypes.buffer_dtype);
  if (!dtypes.param_dtype) return;
  lowered_ = std::make_shared<LoweredParameters>(*dtypes.param_dtype, all.tensors, all.names);
  lowered_->attach();
}

CommHook State::hook_for_reducer() const {
  if (!options_.mixed_precision) return hook_;
  const auto& dtypes = *options_.mixed_precision;
  const auto dtype = dtypes.reduce_dtype ? dtypes.reduce_dtype : dtypes.param_dtype;
  if (!dtype) return hook_;
  return CompressedHook{hook_ ? hook_ : CommHook(allreduce_hook), *dtype};
}

void State::lower_parameters(c10::function_ref<void(nn::TensorVisitor)> for_each_input) {
  const auto dtype = *options_.mixed_precision->param_dtype;
  for_each_input([&](at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(dtype);
  });
  lowered_here_ = lowered_->lower();
}

}  // namespace tessera::replication
