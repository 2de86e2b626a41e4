#pragma once

#include <tessera/nn/module_ref.h>

#include <torch/csrc/api/include/torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

/// Linear layers whose products are computed in 8 bits.
namespace tessera {

enum class Fp8Scaling {
  Tensorwise,  // one scale per tensor; all three products in 8 bits, the incoming gradient as e5m2
  Rowwise,     // one per row, all as e4m3; the weight's gradient is of what was not cast
};

enum class Fp8Amax {
  Current,  // a tensor is scaled by the largest magnitude in it
  Delayed,  // by the largest of the last calls; larger numbers saturate. Tensorwise alone
};

struct Fp8Options {
  Fp8Scaling scaling = Fp8Scaling::Tensorwise;
  Fp8Amax amax = Fp8Amax::Current;
  int64_t history = 16;  // of how many calls Delayed takes the largest
  /// Which layers, by dotted name; none: all that fit.
  std::function<bool(const std::string& name, const torch::nn::LinearImpl& layer)> filter = {};
};

namespace nn {
void apply_fp8(torch::nn::Module& module, const Fp8Options& options);
}

/// Every tessera::nn::Linear (not those derived from it) in `module` whose sizes are multiples of
/// 16, and that the filter takes, multiplies float8 numbers by at::_scaled_mm: input and weight as
/// e4m3 in the forward, and the incoming gradient with each of them in the backward. What comes out
/// is of the dtype that it is without: Autocast's, else the input's. Parameters, their names and
/// state dicts stay as they are: the weights are cast in each call. A number that is not finite
/// makes the results of its row (Rowwise) or tensor NaN. Returns what it was given. Before or after
/// replicate and fully_shard, once per layer; not with weights that parallelize_module distributes.
/// GPUs of compute capability 8.9 and later; on the CPU it computes the same, slowly.
template <nn::ModuleLike M>
M fp8(M&& module, const Fp8Options& options = {}) {
  nn::apply_fp8(nn::as_module(module), options);
  return std::forward<M>(module);
}

}  // namespace tessera
