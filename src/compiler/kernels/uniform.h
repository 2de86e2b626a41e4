#pragma once

namespace tessera::compiler {

/// A number of [0, 1) for each element, which the seed and the element's place decide, so that
/// kernels draw where they need it, and again in backward:
/// "uniform(Tensor seed, int[] size) -> Tensor". Philox 4x32 of ten rounds (Salmon et al., 2011)
/// with the seed as its key; four neighbours share one block of numbers.
constexpr const char* kUniform = "tessera::uniform";

}  // namespace tessera::compiler
