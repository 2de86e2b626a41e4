#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cmath>

namespace tessera::testing {

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Case {
  at::ScalarType dtype;
  double rtol;
  double atol;
};

TEST(Tolerance, IsTheTableOfTheRequirements) {
  for (const Case& row : {Case{at::kFloat, 1.3e-6, 1e-5}, Case{at::kHalf, 1e-3, 1e-5},
                          Case{at::kBFloat16, 1.6e-2, 1e-5}, Case{at::kDouble, 1e-7, 1e-7},
                          Case{at::kLong, 0, 0}, Case{at::kBool, 0, 0}}) {
    EXPECT_EQ(tolerance_of(row.dtype).rtol, row.rtol) << row.dtype;
    EXPECT_EQ(tolerance_of(row.dtype).atol, row.atol) << row.dtype;
  }
}

TEST(Tolerance, IsRelativeToTheExpectedValue) {
  const at::Tensor expected = at::full({3}, 100, at::kDouble);
  EXPECT_TRUE(tensors_equal(expected + 100 * 1e-7, expected));
  EXPECT_FALSE(tensors_equal(expected + 100 * 1.02e-7, expected));
  EXPECT_TRUE(tensors_equal(expected + 1, expected, Tolerance{.rtol = 0, .atol = 1}));
}

TEST(Tolerance, NanEqualsNanAndInfinityItself) {
  const at::Tensor special = at::tensor({NAN, INFINITY, -INFINITY, 1.0F});
  EXPECT_TRUE(tensors_equal(special, special.clone()));
  EXPECT_FALSE(tensors_equal(special, special.neg()));
  EXPECT_FALSE(tensors_equal(special, at::tensor({1.0F, INFINITY, -INFINITY, 1.0F})));
  EXPECT_FALSE(tensors_equal(at::tensor({1.0F}), at::tensor({INFINITY})));
}

TEST(Tolerance, ShapeDtypeAndDefinednessCount) {
  EXPECT_FALSE(tensors_equal(at::zeros({2, 1}), at::zeros({2})));
  EXPECT_FALSE(tensors_equal(at::zeros({2}), at::zeros({2}, at::kDouble)));
  EXPECT_FALSE(tensors_equal(at::Tensor(), at::zeros({2})));
  EXPECT_TRUE(tensors_equal(at::Tensor(), at::Tensor()));
  EXPECT_TRUE(tensors_equal(at::zeros({0, 3}), at::zeros({0, 3})));
  EXPECT_TRUE(tensors_equal(at::zeros({}), at::zeros({})));
}

TEST(Tolerance, OtherDtypesAreExact) {
  EXPECT_FALSE(tensors_equal(at::tensor({1, 2}), at::tensor({1, 3})));
  EXPECT_TRUE(tensors_equal(at::ones({2}, at::kBool), at::ones({2}, at::kBool)));
  EXPECT_FALSE(tensors_equal(at::ones({2}, at::kBool), at::zeros({2}, at::kBool)));
  EXPECT_TRUE(tensors_equal(at::ones({2}, at::kUInt16), at::ones({2}, at::kUInt16)));
  const at::Tensor complex = at::randn({3}, at::kComplexFloat);
  EXPECT_TRUE(tensors_equal(complex.conj(), complex.conj().clone()));
  EXPECT_FALSE(tensors_equal(complex.conj(), complex));
}

TEST(Tolerance, FailuresShowWhereAndHowMuch) {
  const at::Tensor expected = at::full({2, 3}, 4.0);
  at::Tensor actual = expected.clone();
  actual[1][2] = 5.0;
  EXPECT_THAT(
      tensors_equal(actual, expected).message(),
      AllOf(HasSubstr("1 of 6 elements"), HasSubstr("absolute difference 1 at [1, 2]"),
            HasSubstr("relative difference 0.25 at [1, 2]"), HasSubstr("got 5, expected 4")));
  static at::Tensor static_actual, static_expected;  // EXPECT_NONFATAL_FAILURE takes no locals
  static_actual = actual;
  static_expected = expected;
  EXPECT_NONFATAL_FAILURE(expect_equal(static_actual, static_expected, "the weight"), "the weight");
}

TEST(Tolerance, BitwiseSeesTheSignOfZero) {
  EXPECT_TRUE(tensors_bitwise_equal(at::tensor({NAN, 1.0F}), at::tensor({NAN, 1.0F})));
  EXPECT_FALSE(tensors_bitwise_equal(at::tensor({0.0F}), at::tensor({-0.0F})));
  const at::Tensor matrix = at::randn({3, 4});
  EXPECT_TRUE(tensors_bitwise_equal(matrix.t(), matrix.t().contiguous()));
  at::Tensor other = matrix.clone();
  other[2][1] += 1;
  EXPECT_THAT(tensors_bitwise_equal(other, matrix).message(),
              AllOf(HasSubstr("1 of 12"), HasSubstr("[2, 1]")));
  EXPECT_TRUE(tensors_bitwise_equal(at::zeros({}), at::zeros({})));
}

}  // namespace

}  // namespace tessera::testing
