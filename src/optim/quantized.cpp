#include "optim/quantized.h"

#include <ATen/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace tessera::optim {
namespace {

constexpr double kSignedCodes = 127, kCodes = 255;
// Multiples of either, without their whole parts, lie evenly between 0 and 1.
constexpr double kOverSteps = 0.6180339887498949, kOverElements = 0.7548776662466927;

int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

/// [blocks, 256]
at::Tensor in_blocks(const at::Tensor& values) {
  const at::Tensor flat = values.reshape({-1});
  const int64_t missing = blocks_of(flat.numel()) * kBlock - flat.numel();
  const at::Tensor full = missing == 0 ? flat : at::constant_pad_nd(flat, {0, missing});
  return full.view({-1, kBlock});
}

bool has_signs(const at::Tensor& codes) { return codes.scalar_type() == at::kChar; }

}  // namespace

at::Tensor zero_codes(int64_t elements, bool is_signed, c10::Device device) {
  return at::zeros({blocks_of(elements), kBlock},
                   at::TensorOptions(device).dtype(is_signed ? at::kChar : at::kByte));
}

at::Tensor zero_scales(int64_t elements, c10::Device device) {
  return at::zeros({blocks_of(elements), 1}, at::TensorOptions(device).dtype(at::kFloat));
}

bool is_coded(const at::Tensor& state) {
  return state.scalar_type() == at::kChar || state.scalar_type() == at::kByte;
}

at::Tensor decoded(const at::Tensor& codes, const at::Tensor& scales, at::IntArrayRef sizes) {
  const at::Tensor levels = codes.to(at::kFloat).div(has_signs(codes) ? kSignedCodes : kCodes);
  const at::Tensor values = has_signs(codes) ? levels.mul(levels.abs()) : levels.square().square();
  const int64_t elements = c10::multiply_integers(sizes);
  return values.mul(scales).view({-1}).narrow(0, 0, elements).view(sizes);
}

void encode(const at::Tensor& values, at::Tensor codes, at::Tensor scales,
            const at::Tensor& thresholds) {
  if (codes.numel() == 0) return;
  const at::Tensor blocks = in_blocks(values);
  const at::Tensor largest = blocks.abs().amax(1, /*keepdim=*/true);
  scales.copy_(largest);
  const at::Tensor ratios =
      blocks.div(largest.clamp_min(static_cast<double>(std::numeric_limits<float>::min())));
  const at::Tensor roots = ratios.abs().sqrt();
  at::Tensor levels;
  if (has_signs(codes)) {
    levels = roots.mul(kSignedCodes).add(thresholds).floor().mul(ratios.sign());
  } else {
    levels = roots.sqrt().mul(kCodes).add(thresholds).floor().clamp(1, kCodes);
  }
  codes.copy_(levels.nan_to_num(0));  // the scale of such a block is no number either
}

at::Tensor thresholds_at(const at::Tensor& count, c10::Device device) {
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  if (!count.defined()) return at::full({kBlock}, 0.5, options);
  const at::Tensor of_step = count.to(at::kDouble).mul(kOverSteps).frac();
  return at::arange(kBlock, options).mul(kOverElements).add(of_step.to(at::kFloat)).frac();
}

void round_into(at::Tensor state, const at::Tensor& values, const at::Tensor& thresholds) {
  if (values.numel() == 0) return;
  const at::Tensor blocks = in_blocks(values);
  // The lower half of a float32 is what bfloat16 does not have.
  const at::Tensor added = blocks.view(at::kInt).add(thresholds.mul(65536).to(at::kInt));
  const at::Tensor rounded = added.bitwise_and(-65536).view(at::kFloat);
  state.copy_(rounded.view({-1}).narrow(0, 0, values.numel()).view(values.sizes()));
}

}  // namespace tessera::optim
