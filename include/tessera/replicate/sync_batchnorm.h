#pragma once

#include <tessera/comm.h>
#include <tessera/nn/methods.h>

#include <torch/csrc/api/include/torch/nn/modules/batchnorm.h>

namespace tessera {
namespace nn {

/// BatchNorm over the batches of all ranks of a group: mean and variance are those of all rows, the
/// gradients those of one device on all of them, also where ranks have different numbers of rows.
/// In eval(), with running statistics, it is BatchNorm. Takes [rows, channels, ...]. In training,
/// every rank of the group calls forward and backward.
struct SyncBatchNormImpl
    : torch::nn::NormImplBase<1, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Group group = {});
  explicit SyncBatchNormImpl(int64_t channels) : SyncBatchNormImpl({channels}, {}) {}
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  Group group;  // none: the default group

 protected:
  void _check_input_dim(const at::Tensor& input) override;  // NOLINT: libtorch's name
};
TESSERA_MODULE(SyncBatchNorm);

}  // namespace nn

namespace detail {
void convert_sync_batchnorm(torch::nn::Module& module, const Group& group);
}

/// From here on every nn::BatchNorm1d, 2d and 3d in `module` normalises over all ranks of the group
/// (none: the default group), as nn::SyncBatchNorm does. Modules, parameters and their names stay
/// what they are. What was given is returned.
template <nn::ModuleLike M>
M convert_sync_batchnorm(M&& module, const Group& group = {}) {
  detail::convert_sync_batchnorm(nn::as_module(module), group);
  return std::forward<M>(module);
}

}  // namespace tessera
