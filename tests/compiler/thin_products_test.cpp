// Products of a few samples by kernels of ours, against ATen's in float64.
#include "compiler/kernels/thin_products.h"

#include "support/random.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

namespace tessera::compiler {
namespace {

bool is_close(const at::Tensor& got, const at::Tensor& left, const at::Tensor& right,
              const at::Tensor& bias = {}) {
  auto wanted = left.to(at::kDouble).mm(right.to(at::kDouble));
  if (bias.defined()) wanted += bias;
  // Sums of so many numbers, each rounded.
  const double bound = 1e-6 * std::sqrt(static_cast<double>(left.size(1))) + 1e-6;
  return at::allclose(got.to(at::kDouble), wanted, 1e-5, 4 * bound);
}

bool has_kernels() {
  const auto out = at::empty({4, 8});
  return multiply_thin(out, at::ones({4, 4}), at::ones({8, 4}).t());
}

/// Odd sizes, all three forms, with and without a bias.
TEST(ThinProducts, AreThoseOfAten) {
  if (!has_kernels()) GTEST_SKIP() << "needs a processor with AVX2 or AVX-512";
  std::mt19937 random(testing::test_seed());
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  at::manual_seed(testing::test_seed());
  int computed = 0;
  for (int i = 0; i < 300; ++i) {
    const int64_t samples = draw(1, 40), rows = draw(1, 90), inner = draw(1, 90);
    SCOPED_TRACE(c10::str("case ", i, ": ", samples, " samples, ", rows, " x ", inner));
    const auto x = at::randn({samples, inner}), weight = at::randn({rows, inner});
    const auto bias = at::randn({2 * rows}).slice(0, 0, 2 * rows, draw(1, 2)).slice(0, 0, rows);
    const auto gradient = at::randn({samples, rows});
    const auto out = at::full({samples, rows}, NAN), into = at::full({samples, inner}, NAN),
               outer = at::full({rows, inner}, NAN);
    if (multiply_thin(out, x, weight.t(), bias)) EXPECT_TRUE(is_close(out, x, weight.t(), bias));
    if (multiply_thin(out, x, weight.t())) EXPECT_TRUE(is_close(out, x, weight.t()));
    if (multiply_thin(into, gradient, weight)) EXPECT_TRUE(is_close(into, gradient, weight));
    computed += static_cast<int>(multiply_thin(outer, gradient.t(), x));
    if (!outer.isnan().any().item<bool>()) EXPECT_TRUE(is_close(outer, gradient.t(), x));
  }
  EXPECT_GT(computed, 50);
}

/// A row is the same, whichever are computed with it.
TEST(ThinProducts, GiveRowsTheSameBitsInAnyBlock) {
  if (!has_kernels()) GTEST_SKIP() << "needs a processor with AVX2 or AVX-512";
  at::manual_seed(1);
  const auto x = at::randn({7, 45}), gradient = at::randn({7, 61});
  const auto all = at::empty({61, 45});
  ASSERT_TRUE(multiply_thin(all, gradient.t(), x));
  for (int64_t begin = 0; begin < 61; begin += 10) {
    const int64_t count = std::min<int64_t>(10, 61 - begin);
    const auto block = at::empty({count, 45});
    ASSERT_TRUE(multiply_thin(block, gradient.t().narrow(0, begin, count), x));
    EXPECT_TRUE(at::equal(block, all.narrow(0, begin, count))) << begin;
  }
}

TEST(ThinProducts, GiveTheSameBitsOnAnyNumberOfThreads) {
  if (!has_kernels()) GTEST_SKIP() << "needs a processor with AVX2 or AVX-512";
  at::manual_seed(1);
  const auto x = at::randn({9, 700}), weight = at::randn({800, 700}),
             gradient = at::randn({9, 800});
  std::vector<at::Tensor> results[2];
  const int before = at::get_num_threads();
  for (const int threads : {1, 4}) {
    at::set_num_threads(threads);
    auto& made = results[threads == 4];
    made = {at::empty({9, 800}), at::empty({9, 700}), at::empty({800, 700})};
    ASSERT_TRUE(multiply_thin(made[0], x, weight.t()));
    ASSERT_TRUE(multiply_thin(made[1], gradient, weight));
    ASSERT_TRUE(multiply_thin(made[2], gradient.t(), x));
  }
  at::set_num_threads(before);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i;
}

TEST(ThinProducts, KeepNaNsAndInfinities) {
  if (!has_kernels()) GTEST_SKIP() << "needs a processor with AVX2 or AVX-512";
  for (const float number : {NAN, INFINITY}) {
    auto x = at::ones({3, 20}), weight = at::ones({18, 20});
    x[1][4] = number;
    const auto out = at::empty({3, 18});
    ASSERT_TRUE(multiply_thin(out, x, weight.t()));
    const auto wanted = x.mm(weight.t());
    EXPECT_TRUE(at::allclose(out, wanted, 1e-6, 0, /*equal_nan=*/true)) << out;
  }
}

/// Those are ATen's.
TEST(ThinProducts, LeaveOthersAlone) {
  const auto right = at::randn({300, 20});
  EXPECT_FALSE(multiply_thin(at::empty({1, 20}), at::randn({1, 300}), right));
  EXPECT_FALSE(multiply_thin(at::empty({100, 20}), at::randn({100, 300}), right));
  EXPECT_FALSE(multiply_thin(at::empty({4, 20}, at::kDouble), at::randn({4, 300}, at::kDouble),
                             right.to(at::kDouble)));
  EXPECT_FALSE(multiply_thin(at::empty({4, 20}), at::randn({4, 600}).slice(1, 0, 600, 2), right));
  EXPECT_FALSE(multiply_thin(at::empty({4, 20}), at::randn({4, 300}), right, at::randn({20})));
  EXPECT_FALSE(multiply_thin(at::empty({0, 20}), at::randn({0, 300}), right));
  EXPECT_FALSE(multiply_thin(at::empty({4, 20}), at::randn({4, 300}), right.t().contiguous().t(),
                             at::randn({1})));
}

}  // namespace
}  // namespace tessera::compiler
