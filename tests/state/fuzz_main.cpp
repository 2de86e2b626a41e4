// The readers alone, under sanitizers: fuzz_readers [COUNT [SEED]].
#include "state/fuzz_readers.h"

#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100'000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 20240229;
  const auto result = tessera::testing::fuzz_readers(seed, count);
  std::cout << "seed " << seed << ": " << result.refused << " inputs refused, " << result.accepted
            << " accepted\n"
            << result.failure;
  return result.failure.empty() && result.refused > 0 && result.accepted > 0 ? 0 : 1;
}
