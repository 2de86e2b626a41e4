#include "support/random.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace tessera::testing {

uint64_t test_seed() {
  const char* variable = std::getenv("TESSERA_TEST_SEED");
  const uint64_t seed = variable != nullptr ? std::stoull(variable) : 20240607;
  if (::testing::UnitTest::GetInstance()->current_test_info() != nullptr) {
    ::testing::Test::RecordProperty("seed", std::to_string(seed));
  }
  return seed;
}

}  // namespace tessera::testing
