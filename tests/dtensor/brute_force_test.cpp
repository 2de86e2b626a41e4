#include "dtensor/brute_force.h"

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

namespace tessera {
namespace {

using MeshShape = std::vector<int64_t>;

/// 1: every placement (make test-dtensor); by default a seeded sample.
double share() {
  const char* variable = std::getenv("TESSERA_DTENSOR_SHARE");
  return variable != nullptr ? std::atof(variable) : 0.05;
}

class BruteForce : public ::testing::TestWithParam<std::tuple<std::string, MeshShape>> {};

TEST_P(BruteForce, GivesWhatOneDeviceGives) {
  const auto& [family, mesh_shape] = GetParam();
  const auto report = brute_force::try_family(family, mesh_shape, share());
  std::cout << family << " on " << c10::IntArrayRef(mesh_shape) << ": " << report.calls
            << " calls, " << report.operators.size() << " operators by rule";
  for (const auto& name : report.without_rule) std::cout << ", without rule " << name;
  std::cout << '\n';
  if (std::getenv("TESSERA_DTENSOR_OPERATORS") != nullptr) {
    for (const auto& name : report.operators) std::cout << "operator " << name << '\n';
  }
}

std::string name_of(const ::testing::TestParamInfo<BruteForce::ParamType>& test) {
  std::string name = std::get<0>(test.param) + "_";
  for (const auto ranks : std::get<1>(test.param)) name += std::to_string(ranks);
  return name;
}

INSTANTIATE_TEST_SUITE_P(OnThreads, BruteForce,
                         ::testing::Combine(::testing::ValuesIn(brute_force::families()),
                                            ::testing::Values(MeshShape{2}, MeshShape{3},
                                                              MeshShape{4}, MeshShape{2, 2})),
                         name_of);

}  // namespace
}  // namespace tessera
