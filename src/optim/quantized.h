#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

/// State in fewer bits.
///
/// Note [8 bits]. Elements in the order of memory are cut into blocks of 256; the last one is
/// filled up with zeros. A block has a scale, its largest magnitude, and a code per element, whose
/// spacing grows with the magnitude: signed values are code^2, others code^4, of codes from 0 to 1.
/// So second moments have a range of 255^4 within a block, and what they are divided by is never 0
/// where the first moment is not. What has been read is written again without a change if it is
/// rounded to the nearest.
///
/// Note [dither]. A second moment changes by a thousandth at a step, which rounding to the nearest
/// would lose for good; and small first moments of 8 bits, by a tenth, while second ones fall, so
/// that weights without gradients would run away. So both are rounded up as often as their fraction
/// says: against thresholds that lie evenly over steps and over elements. No random numbers, so
/// that ranks and programs draw none.
namespace tessera::optim {

inline constexpr int64_t kBlock = 256;

/// Blocks of as many elements, and zeros of them: [blocks, 256], [blocks, 1].
at::Tensor zero_codes(int64_t elements, bool is_signed, c10::Device device);
at::Tensor zero_scales(int64_t elements, c10::Device device);

/// Whether it holds codes.
bool is_coded(const at::Tensor& state);
/// float32 of these sizes. Codes of int8 are signed, of uint8 are not.
at::Tensor decoded(const at::Tensor& codes, const at::Tensor& scales, at::IntArrayRef sizes);
/// Into `codes` and `scales`. `thresholds`: from 0 to 1, one per element of a block.
void encode(const at::Tensor& values, at::Tensor codes, at::Tensor scales,
            const at::Tensor& thresholds);

/// Of a step, by its count: [256] on the device. Undefined count: 0.5, to the nearest.
at::Tensor thresholds_at(const at::Tensor& count, c10::Device device);
/// Values of float32 into bfloat16.
void round_into(at::Tensor state, const at::Tensor& values, const at::Tensor& thresholds);

}  // namespace tessera::optim
