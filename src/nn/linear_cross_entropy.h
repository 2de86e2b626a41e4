#pragma once

#include <tessera/nn/linear_cross_entropy.h>

#include <functional>

/// What linear_cross_entropy needs of whoever knows DTensors, which are above this folder.
namespace tessera::nn::detail {

/// The classes of a head that this rank holds.
struct ClassShard {
  int64_t first;
  int64_t most;  // that a rank holds: the same on all, so that they make the same blocks
  /// Over the ranks that hold the others. Waits for all of them.
  std::function<at::Tensor(const at::Tensor&)> largest, sum;
};

/// Weight and bias are those of the shard; the gradient of `input` is this rank's part of a sum.
at::Tensor linear_cross_entropy_of_shard(const at::Tensor& input, const at::Tensor& weight,
                                         const at::Tensor& target,
                                         const LinearCrossEntropyOptions& options,
                                         ClassShard shard);

/// Takes the calls with a DTensor among weight, bias, input and target.
void set_distributed_linear_cross_entropy(decltype(&linear_cross_entropy) function);

}  // namespace tessera::nn::detail
