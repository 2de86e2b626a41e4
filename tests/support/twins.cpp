#include "support/twins.h"

#include <ATen/Context.h>

#include <mutex>

namespace tessera::testing {

namespace {

std::recursive_mutex generator_mutex;

}  // namespace

SeedScope::SeedScope(uint64_t seed) {
  generator_mutex.lock();
  at::manual_seed(seed);
}

SeedScope::~SeedScope() { generator_mutex.unlock(); }

}  // namespace tessera::testing
