#pragma once

#include "compiler/ir/operators.h"
#include "compiler/ir/verify.h"
#include "compiler/passes/fuse.h"
#include "compiler/runtime/listing.h"
#include "compiler/runtime/program.h"
#include "recorded_steps.h"
#include "support/temporary_folder.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>

namespace tessera::compiler {

/// Compiles into a folder of its own.
class CodegenKernels : public ::testing::Test {
 protected:
  CodegenKernels() { setenv("TESSERA_CACHE", folder_.path().c_str(), 1); }
  ~CodegenKernels() override { unsetenv("TESSERA_CACHE"); }

  testing::TemporaryFolder folder_;
};

inline Argument number(c10::IValue value) { return Argument::of(std::move(value)); }

/// Fuses, compiles and runs; `kernels`: how many there should be; on a GPU those that read the same
/// are fewer.
inline std::vector<at::Tensor> run_fused(Steps& steps, size_t kernels) {
  fuse(steps.graph);
  verify(steps.graph, "fuse");
  size_t fused = 0;
  for (const Node& node : steps.graph.nodes) fused += node.op == kFused ? 1 : 0;
  const bool is_on_host = steps.inputs.empty() || steps.inputs[0].is_cpu();
  if (is_on_host)
    EXPECT_EQ(fused, kernels) << steps.graph;
  else
    EXPECT_TRUE(fused <= kernels && (fused > 0) == (kernels > 0)) << fused << steps.graph;
  std::string why;
  auto loaded = load_kernels(write_kernels(steps.graph), &why);
  EXPECT_TRUE(loaded) << why << program_text(steps.graph);
  if (!loaded) return {};
  return Program(steps.graph, std::move(*loaded)).run(steps.inputs);
}

/// The graph after a pass, from a folder of dumps.
inline Graph dumped(const std::filesystem::path& folder, const std::string& pass) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.path().filename().string().ends_with("-" + pass + ".txt")) continue;
    std::ifstream file(entry.path());
    return Graph::parse({std::istreambuf_iterator<char>(file), {}});
  }
  ADD_FAILURE() << "no graph after " << pass;
  return {};
}

/// The kernels of what a host has captured, as if it were a GPU's: NVRTC needs none.
inline std::string kernels_for_gpus(Graph graph) {
  for (size_t i = 0; i < graph.value_count(); ++i)
    graph.type(static_cast<ValueId>(i)).device = c10::Device(at::kCUDA, 0);
  fuse(graph);
  return write_kernels(graph).text();
}

/// How many numbers of the dtype lie between the two, one of them counted.
inline int64_t steps_between(double a, double b, at::ScalarType dtype) {
  const auto ordered = [&](double value) -> int64_t {
    int64_t bits = 0;
    switch (dtype) {
      case at::kDouble:
        bits = std::bit_cast<int64_t>(value);
        return bits < 0 ? std::numeric_limits<int64_t>::min() - bits : bits;
      case at::kFloat:
        bits = std::bit_cast<int32_t>(static_cast<float>(value));
        return bits < 0 ? std::numeric_limits<int32_t>::min() - bits : bits;
      case at::kHalf:
        bits = static_cast<int16_t>(c10::Half(static_cast<float>(value)).x);
        return bits < 0 ? std::numeric_limits<int16_t>::min() - bits : bits;
      default:
        bits = static_cast<int16_t>(c10::BFloat16(static_cast<float>(value)).x);
        return bits < 0 ? std::numeric_limits<int16_t>::min() - bits : bits;
    }
  };
  return std::abs(ordered(a) - ordered(b));
}

/// The same numbers (all NaNs are one), signs of zeros included, or at most `ulp` apart, or, where
/// there is one, by what `slack` has at their place.
inline void expect_same(const at::Tensor& expected, const at::Tensor& got, int64_t ulp,
                        const std::string& what, const at::Tensor& slack = {}) {
  ASSERT_EQ(expected.sizes(), got.sizes()) << what;
  ASSERT_EQ(expected.scalar_type(), got.scalar_type()) << what;
  const auto dtype = expected.scalar_type();
  if (!c10::isFloatingType(dtype)) {
    EXPECT_TRUE(at::equal(expected, got)) << what;
    return;
  }
  const auto left = expected.to(at::kDouble).contiguous();
  const auto right = got.to(at::kDouble).contiguous();
  for (int64_t i = 0; i < left.numel(); ++i) {
    const double a = left.data_ptr<double>()[i];
    const double b = right.data_ptr<double>()[i];
    if (std::isnan(a) && std::isnan(b)) continue;
    if (ulp == 0 ? std::bit_cast<int64_t>(a) == std::bit_cast<int64_t>(b)
                 : steps_between(a, b, dtype) <= ulp)
      continue;
    const double allowed = slack.defined() ? slack.data_ptr<double>()[i] : 0;
    if (std::abs(a - b) <= allowed || std::isinf(allowed)) continue;
    FAIL() << what << ": element " << i << " is " << b << ", ATen's " << a;
  }
}

/// Normal ones and special ones.
inline at::Tensor numbers(at::ScalarType dtype, int64_t count, uint64_t seed) {
  at::manual_seed(seed);
  if (dtype == at::kBool) return at::randint(0, 2, {count}).to(at::kBool);
  if (!c10::isFloatingType(dtype)) return at::randint(-100, 100, {count}, dtype);
  auto values = at::randn({count}) * 3;
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> special = {0.F,   -0.F,   inf,      -inf,    NAN,   1.F,   -1.F,
                                      1e-7F, -1e-7F, 1e-41F,   -1e-41F, 90.F,  -90.F, 6e4F,
                                      7e4F,  1e30F,  -3.4e38F, 0.5F,    -0.5F, 2.5F,  1e-3F};
  for (size_t i = 0; i < special.size() && static_cast<int64_t>(i) < count; ++i) {
    // At different places for different seeds, so that they meet each other.
    values[static_cast<int64_t>((i * (seed + 1) + seed) % static_cast<uint64_t>(count))] =
        special[i];
  }
  return values.to(dtype);
}

}  // namespace tessera::compiler
