#include <tessera/replicate/sync_batchnorm.h>

#include "nn/module_hooks.h"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

namespace tessera {
namespace {

/// What all kinds of batch norm have.
struct Norm {
  const torch::nn::BatchNormOptions& options;
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
  bool is_training;
};

template <class Impl>
Norm norm_of(Impl& module) {
  return {module.options,      module.weight,      module.bias,
          module.running_mean, module.running_var, module.num_batches_tracked,
          module.is_training()};
}

/// By how much a batch changes the running statistics; counts it.
double count_batch(const Norm& norm) {
  const auto& momentum = norm.options.momentum();
  if (!norm.num_batches_tracked.defined()) return momentum.value_or(0);
  norm.num_batches_tracked.add_(1);
  return momentum ? *momentum : 1.0 / norm.num_batches_tracked.item<double>();
}

/// Of one number per channel, to be used with [rows, channels, ...].
at::Tensor shaped(const at::Tensor& numbers, int64_t dims) {
  std::vector<int64_t> sizes(static_cast<size_t>(dims), 1);
  sizes[1] = -1;
  return numbers.view(sizes);
}

void update_running(const Norm& norm, const at::Tensor& mean, const at::Tensor& variance,
                    const at::Tensor& rows) {
  const double factor = count_batch(norm);
  if (!norm.running_mean.defined()) return;
  const at::NoGradGuard no_grad;
  const auto unbiased = variance * (rows / (rows - 1).clamp_min(1));
  norm.running_mean.mul_(1 - factor).add_(mean.to(norm.running_mean.scalar_type()), factor);
  norm.running_var.mul_(1 - factor).add_(unbiased.to(norm.running_var.scalar_type()), factor);
}

/// With statistics of all ranks' rows. The mean first, then squares of what differs from it, so
/// that numbers with a large mean keep their digits.
at::Tensor normalize_together(const Norm& norm, const at::Tensor& input, const Group& group) {
  const auto x = input.to(at::toOpMathType(input.scalar_type()));
  const int64_t channels = x.size(1);
  std::vector<int64_t> dims = {0};
  for (int64_t i = 2; i < x.dim(); ++i) dims.push_back(i);
  const auto own = at::full({1}, channels == 0 ? 0 : x.numel() / channels, x.options());
  const auto sums = all_reduce(at::cat({x.sum(dims), own}), ReduceOp::SUM, group);
  const auto rows = sums.narrow(0, channels, 1).detach();
  const auto mean = sums.narrow(0, 0, channels) / rows;
  const auto centered = x - shaped(mean, x.dim());
  const auto variance = all_reduce(centered.square().sum(dims), ReduceOp::SUM, group) / rows;
  if (norm.is_training && norm.options.track_running_stats())
    update_running(norm, mean.detach(), variance.detach(), rows);
  auto scale = (variance + norm.options.eps()).rsqrt();
  if (norm.weight.defined()) scale = scale * norm.weight;
  auto result = centered * shaped(scale, x.dim());
  if (norm.bias.defined()) result = result + shaped(norm.bias, x.dim());
  return result.to(input.scalar_type());
}

at::Tensor normalize(const Norm& norm, const at::Tensor& input, const Group& group) {
  TORCH_CHECK_VALUE(input.dim() >= 2 && input.size(1) == norm.options.num_features(),
                    "SyncBatchNorm: expected an input of [rows, ", norm.options.num_features(),
                    ", ...], got ", input.sizes());
  const bool uses_batch = norm.is_training || !norm.options.track_running_stats();
  if (uses_batch && world_size(group ? group : default_group()) > 1)
    return normalize_together(norm, input, group);
  const bool counts = norm.is_training && norm.options.track_running_stats();
  const double factor = counts ? count_batch(norm) : 0;
  return at::batch_norm(input, norm.weight, norm.bias, norm.running_mean, norm.running_var,
                        uses_batch, factor, norm.options.eps(), /*cudnn_enabled=*/true);
}

/// Whether the module is such an Impl, which it then converts.
template <class Impl>
bool convert(torch::nn::Module& module, const Group& group) {
  if (dynamic_cast<Impl*>(&module) == nullptr) return false;
  auto& hooks = nn::require_hook_point(module, "convert_sync_batchnorm").hooks();
  hooks.exchange_stand_in(
      [group](torch::nn::Module& of, nn::Arguments& arguments) {
        return normalize(norm_of(dynamic_cast<Impl&>(of)), arguments.tensor(0), group);
      },
      /*for_good=*/true);
  return true;
}

}  // namespace

namespace nn {

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Group group)
    : NormImplBase(options), group(std::move(group)) {}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& /*input*/) {}  // normalize() does

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  return normalize(norm_of(*this), input, group);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ")";
}

}  // namespace nn

void detail::convert_sync_batchnorm(torch::nn::Module& module, const Group& group) {
  for (const auto& part : module.modules()) {
    convert<torch::nn::BatchNorm1dImpl>(*part, group) ||
        convert<torch::nn::BatchNorm2dImpl>(*part, group) ||
        convert<torch::nn::BatchNorm3dImpl>(*part, group);
  }
}

}  // namespace tessera
