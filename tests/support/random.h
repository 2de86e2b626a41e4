#pragma once

#include <cstdint>

namespace tessera::testing {

/// Seed of tests that draw cases at random: $TESSERA_TEST_SEED, or the same constant in every run.
/// Equal on all ranks. Becomes a property of the running test, and main prints it, so that a
/// failure can be repeated.
uint64_t test_seed();

}  // namespace tessera::testing
