#include "dtensor/brute_force.h"

#include "dtensor/rules.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <set>

namespace tessera {
namespace {

using brute_force::Range;
using brute_force::Report;
using MeshShape = std::vector<int64_t>;

/// 1: every placement (make test-dtensor); by default a seeded sample.
double share() {
  const char* variable = std::getenv("TESSERA_DTENSOR_SHARE");
  return variable != nullptr ? std::atof(variable) : 0.05;
}

class BruteForce : public ::testing::TestWithParam<std::tuple<std::string, MeshShape>> {
 protected:
  static void try_range(Range range) {
    const auto& [family, mesh_shape] = GetParam();
    const auto report = brute_force::try_family(family, mesh_shape, range, share());
    std::cout << family << " on " << c10::IntArrayRef(mesh_shape) << ": " << report.calls
              << " calls, " << report.operators.size() << " operators by rule";
    for (const auto& name : report.without_rule) std::cout << ", without rule " << name;
    std::cout << '\n';
  }
};
using BruteForceWide = BruteForce;

TEST_P(BruteForce, GivesWhatOneDeviceGives) { try_range(Range::Common); }
TEST_P(BruteForceWide, GivesWhatOneDeviceGives) { try_range(Range::Wide); }

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

INSTANTIATE_TEST_SUITE_P(OnThreads, BruteForceWide,
                         ::testing::Combine(::testing::ValuesIn(brute_force::families()),
                                            ::testing::Values(MeshShape{2}, MeshShape{2, 2},
                                                              MeshShape{2, 3}, MeshShape{1, 2},
                                                              MeshShape{3, 1})),
                         name_of);

/// Operators whose kernels are for GPUs; tests with the label cuda run them.
constexpr const char* kNeedGpu[] = {"aten::_masked_scale",
                                    "aten::cudnn_batch_norm",
                                    "aten::cudnn_batch_norm_backward",
                                    "aten::_fused_rms_norm_backward",
                                    "aten::_scaled_dot_product_flash_attention",
                                    "aten::_scaled_dot_product_flash_attention_backward",
                                    "aten::_scaled_dot_product_efficient_attention",
                                    "aten::_scaled_dot_product_efficient_attention_backward",
                                    "aten::_scaled_dot_product_cudnn_attention",
                                    "aten::_scaled_dot_product_cudnn_attention_backward"};
/// Operators that are refused, which tests of errors show.
constexpr const char* kRefused[] = {"aten::squeeze_",    "aten::unsqueeze_",     "aten::t_",
                                    "aten::transpose_",  "aten::swapaxes_",      "aten::swapdims_",
                                    "aten::as_strided_", "aten::resize_",        "aten::resize_as_",
                                    "aten::set_",        "aten::_resize_output_"};

/// Operators whose rule is to gather, since only the whole gives the answer.
constexpr const char* kNeedTheWhole[] = {"aten::_linalg_check_errors",
                                         "aten::_local_scalar_dense",
                                         "aten::_unique",
                                         "aten::_unique2",
                                         "aten::unique_consecutive",
                                         "aten::unique_dim",
                                         "aten::unique_dim_consecutive",
                                         "aten::_unsafe_masked_index",
                                         "aten::_unsafe_masked_index_put_accumulate",
                                         "aten::as_strided",
                                         "aten::as_strided_copy",
                                         "aten::as_strided_scatter",
                                         "aten::block_diag",
                                         "aten::masked_scatter",
                                         "aten::masked_scatter_backward",
                                         "aten::masked_select",
                                         "aten::nonzero",
                                         "aten::nonzero_static",
                                         "aten::repeat_interleave.Tensor",
                                         "aten::searchsorted.Scalar"};

/// Names of operators that can arrive at a rule, of all overloads and with the overload's name:
/// what has a composite kernel arrives as its parts.
std::set<std::string> operators_that_arrive() {
  std::set<std::string> names;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      continue;
    names.insert(name.name);
    names.insert(name.name + "." + name.overload_name);
  }
  return names;
}

/// The names under which rules are registered that some case has to reach.
std::set<std::string> names_to_try() {
  const auto arriving = operators_that_arrive();
  std::set<std::string> names;
  for (const auto& name : dtensor::registered_operators()) {
    const bool is_alone = !arriving.contains(name) && !arriving.contains(name + "_");
    if (!is_alone) names.insert(name);
  }
  for (const auto* name : kNeedGpu) names.erase(name);
  for (const auto* name : kRefused) names.erase(name);
  return names;
}

/// The name under which the rule of an operator is registered, which may be that of all its
/// overloads or of its plain form; empty: it is none of these.
std::string registered_name(const std::string& op, const std::set<std::string>& registered) {
  const auto base = op.substr(0, op.find('.'));
  const auto plain = base.ends_with('_') ? base.substr(0, base.size() - 1) : base;
  for (const auto& name : {op, base, plain}) {
    if (registered.contains(name)) return name;
  }
  return "";
}

// A rule that no case reaches, or whose rows none uses, is a rule nobody has proved.
TEST(BruteForceCoverage, EveryRegisteredRuleIsTriedOnThreads) {
  Report all;
  for (const auto& family : brute_force::families()) {
    // The share is that of `make test`, or the list would depend on it.
    auto report = brute_force::try_family(family, {2}, Range::Common, /*share=*/0.05);
    all.operators.merge(report.operators);
    all.kept_sharded.merge(report.kept_sharded);
  }
  const auto names = dtensor::registered_operators();
  const std::set<std::string> registered(names.begin(), names.end());
  auto untried = names_to_try();
  auto never_sharded = untried;
  for (const auto& name : all.operators) untried.erase(registered_name(name, registered));
  for (const auto* name : kNeedTheWhole) never_sharded.erase(name);
  for (const auto& name : all.kept_sharded) never_sharded.erase(registered_name(name, registered));
  std::cout << all.operators.size() << " operators ran by a rule; " << registered.size()
            << " names have one of their own\n";
  EXPECT_GE(all.operators.size(), 300U);
  for (const auto& name : untried) ADD_FAILURE() << "no case of tests/dtensor calls " << name;
  for (const auto& name : never_sharded) {
    if (untried.contains(name)) continue;
    ADD_FAILURE() << "the cases of " << name << " never keep anything sharded";
  }
}

}  // namespace
}  // namespace tessera
