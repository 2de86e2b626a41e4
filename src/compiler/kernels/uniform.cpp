#include "compiler/kernels/uniform.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <array>

namespace tessera::compiler {
namespace {

at::Tensor low_word(const at::Tensor& number) { return number.bitwise_and(0xFFFFFFFF); }

at::Tensor high_word(const at::Tensor& number) {
  return low_word(number.bitwise_right_shift(c10::Scalar(32)));
}

/// By operators, as kernels do it by instructions: where nothing is fused, and for tests.
at::Tensor uniform(const at::Tensor& seed, at::IntArrayRef size) {
  constexpr int64_t kLeft = 0xD2511F53, kRight = 0xCD9E8D57;
  constexpr int64_t kKeyStepLow = 0x9E3779B9, kKeyStepHigh = 0xBB67AE85;
  const auto element = at::arange(c10::multiply_integers(size), seed.options());
  const auto block = element.bitwise_right_shift(c10::Scalar(2));
  std::array<at::Tensor, 4> words = {low_word(block), high_word(block), at::zeros_like(block),
                                     at::zeros_like(block)};
  auto low = low_word(seed), high = high_word(seed);
  for (int round = 0; round < 10; ++round) {
    const auto left = words[0].mul(kLeft), right = words[2].mul(kRight);
    words = {high_word(right).bitwise_xor(words[1]).bitwise_xor(low), low_word(right),
             high_word(left).bitwise_xor(words[3]).bitwise_xor(high), low_word(left)};
    low = low_word(low.add(kKeyStepLow));
    high = low_word(high.add(kKeyStepHigh));
  }
  const auto which = element.bitwise_and(3).unsqueeze(1);
  const auto word = at::stack(words, 1).gather(1, which).squeeze(1);
  return word.bitwise_right_shift(c10::Scalar(8)).to(at::kFloat).mul(0x1p-24).view(size);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("uniform(Tensor seed, int[] size) -> Tensor", &uniform);
}

}  // namespace tessera::compiler
