#pragma once

#include <tessera/compile.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace tessera::testing {

/// All that a scenario shows, in order.
using Shown = std::vector<torch::Tensor>;

inline torch::Tensor copy_of(const torch::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().resolve_conj().clone() : torch::Tensor();
}

/// Runs `scenario` on a function as it is, and on that function compiled; both show the same.
template <class F>
std::string expect_same(F function, const std::function<void(const F&, Shown&)>& as_it_is,
                        const std::function<void(const Compiled<F>&, Shown&)>& as_program) {
  Shown wanted, got;
  torch::manual_seed(1);
  as_it_is(function, wanted);
  const auto compiled = compile(function);
  torch::manual_seed(1);
  as_program(compiled, got);
  EXPECT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < std::min(got.size(), wanted.size()); ++i) {
    EXPECT_EQ(got[i].defined(), wanted[i].defined()) << i;
    if (!got[i].defined() || !wanted[i].defined()) continue;
    EXPECT_TRUE(torch::allclose(got[i], wanted[i], 1e-5, 1e-6)) << i << got[i] << wanted[i];
  }
  return explain(compiled);
}

/// The scenario is a generic lambda: (step, shown).
template <class F, class S>
std::string expect_twins(F function, S scenario) {
  return expect_same<F>(std::move(function), scenario, scenario);
}

}  // namespace tessera::testing
