#pragma once

#include "support/trainee.h"

#include <cstdint>
#include <memory>
#include <utility>

namespace tessera::testing {

/// Seeds the default generator and keeps other SeedScopes waiting: thread ranks share it.
class SeedScope {
 public:
  explicit SeedScope(uint64_t seed);
  ~SeedScope();
  SeedScope(const SeedScope&) = delete;
  SeedScope& operator=(const SeedScope&) = delete;
};

/// What `make` returns when the default generator starts at `seed`; in thread ranks, too.
///   auto net = seeded(42, [] { return Net(7, 15); });
template <class F>
auto seeded(uint64_t seed, F&& make) {
  const SeedScope scope(seed);
  return std::forward<F>(make)();
}

/// Two modules with equal weights: auto [reference, parallel] = twins<Net>(seed, constructor's
/// arguments…). M: a holder (gives holders) or a module class (gives shared_ptrs).
template <class M, class... Args>
auto twins(uint64_t seed, const Args&... args) {
  const auto make = [&] {
    if constexpr (Holder<M>) {
      return M(args...);
    } else {
      return std::make_shared<M>(args...);
    }
  };
  auto first = seeded(seed, make);
  return std::pair(std::move(first), seeded(seed, make));
}

}  // namespace tessera::testing
