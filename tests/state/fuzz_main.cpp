// The readers alone, under sanitizers: fuzz_readers [COUNT [SEED [MINUTES]]]. With MINUTES, COUNT /
// 50 inputs of each of the seeds from SEED on, until the time is up.
#include "state/fuzz_readers.h"

#include <chrono>
#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  const auto start = std::chrono::steady_clock::now();
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100'000;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 20240229;
  const std::chrono::minutes limit(argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0);
  uint64_t seed = first;
  do {
    // Short rounds, so that the time is kept.
    const auto result =
        tessera::testing::fuzz_readers(seed, limit.count() > 0 ? count / 50 : count);
    std::cout << "seed " << seed << ": " << result.refused << " inputs refused, " << result.accepted
              << " accepted\n"
              << result.failure << std::flush;
    if (!result.failure.empty() || result.refused == 0 || result.accepted == 0) return 1;
    ++seed;
  } while (std::chrono::steady_clock::now() - start < limit);
  return 0;
}
