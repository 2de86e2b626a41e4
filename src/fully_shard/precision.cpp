#include "fully_shard/precision.h"

#include "base/environment.h"
#include "nn/module_hooks.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/batchnorm.h>

namespace tessera::detail::fully_shard {
namespace {

/// Of its parameters, or of its buffers if it has none.
at::ScalarType dtype_of(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    if (parameter.is_floating_point()) return parameter.scalar_type();
  }
  for (const auto& buffer : module.buffers()) {
    if (buffer.defined() && buffer.is_floating_point()) return buffer.scalar_type();
  }
  return at::kFloat;
}

bool is_cast(const at::Tensor& tensor) { return tensor.defined() && tensor.is_floating_point(); }

}  // namespace

MixedPrecision resolved(MixedPrecision precision) {
  if (!precision.module_classes_to_ignore)
    precision.module_classes_to_ignore =
        module_classes<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl,
                       torch::nn::BatchNorm3dImpl>();
  if (!precision.full_precision_in_eval)
    precision.full_precision_in_eval =
        Environment().get_int("FSDP_USE_FULL_PREC_IN_EVAL").value_or(0) == 1;
  return precision;
}

bool keeps_dtype(const torch::nn::Module& module, const MixedPrecision& precision) {
  const bool is_mixed = precision.param_dtype || precision.buffer_dtype;
  return is_mixed && precision.module_classes_to_ignore(module);
}

void cast_around(torch::nn::Module& module) {
  auto& hooks = nn::require_hook_point(module, "fully_shard, with mixed precision").hooks();
  const auto came_in = std::make_shared<std::optional<at::ScalarType>>();
  hooks.add(
      [came_in, own = dtype_of(module)](torch::nn::Module&, nn::Arguments& arguments) {
        came_in->reset();
        arguments.for_each_tensor([&](at::Tensor& tensor) {
          if (!is_cast(tensor)) return;
          *came_in = tensor.scalar_type();
          tensor = tensor.to(own);
        });
      },
      nn::ForwardPreHookOptions{.prepend = false});
  hooks.add(
      [came_in](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
        if (!*came_in) return;
        result.for_each_tensor([&](at::Tensor& tensor) {
          if (is_cast(tensor)) tensor = tensor.to(**came_in);
        });
      },
      nn::ForwardHookOptions{.prepend = true});
}

void CastBuffer::cast(bool full) const {
  const auto dtype = full ? own : low;
  if (buffer.scalar_type() == dtype) return;
  const at::NoGradGuard no_grad;
  buffer.set_data(buffer.to(dtype));
}

}  // namespace tessera::detail::fully_shard
