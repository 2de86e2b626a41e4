#pragma once

#include <cstdint>
#include <string>

namespace tessera::testing {

struct FuzzResult {
  uint64_t refused = 0;   // by a ValueError
  uint64_t accepted = 0;  // and what was accepted made sense
  std::string failure;    // anything else: what happened, with the number of the input
};

/// Gives the readers of safetensors headers, indices, optimizers' groups and files of torch.save
/// `count` mutated inputs.
FuzzResult fuzz_readers(uint64_t seed, uint64_t count);

}  // namespace tessera::testing
