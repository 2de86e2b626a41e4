#include <tessera/optim.h>

#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tessera::optim {
namespace {

using testing::expect_bitwise_equal;

at::Tensor with_gradient(const at::Tensor& grad) {
  at::Tensor param = at::zeros_like(grad).set_requires_grad(true);
  param.mutable_grad() = grad;
  return param;
}

TEST(ClipGrad, ScalesLongGradientsAndLeavesShortOnes) {
  const std::vector<at::Tensor> params = {with_gradient(at::tensor({3.0F})),
                                          with_gradient(at::tensor({0.0F, 4.0F})),
                                          at::zeros({2}).set_requires_grad(true)};
  EXPECT_EQ(clip_grad_norm_(params, 10).item<float>(), 5);
  expect_bitwise_equal(params[0].grad(), at::tensor({3.0F}));
  EXPECT_EQ(clip_grad_norm_(params, 1).item<float>(), 5);
  EXPECT_NEAR(params[0].grad().item<float>(), 0.6, 1e-6);
  EXPECT_NEAR(get_total_norm({params[0].grad(), params[1].grad()}).item<float>(), 1, 1e-6);
  EXPECT_FALSE(params[2].grad().defined());
}

TEST(ClipGrad, NothingToClipHasNormZero) {
  expect_bitwise_equal(clip_grad_norm_({}, 1), at::scalar_tensor(0.0, at::kFloat));
  expect_bitwise_equal(clip_grad_norm_(at::zeros({2}).set_requires_grad(true), 1),
                       at::scalar_tensor(0.0, at::kFloat));
  expect_bitwise_equal(get_total_norm({}), at::scalar_tensor(0.0, at::kFloat));
}

TEST(ClipGrad, ClampsValues) {
  const at::Tensor param = with_gradient(at::tensor({-3.0F, 0.5F, 2.0F}));
  clip_grad_value_(param, 1);
  expect_bitwise_equal(param.grad(), at::tensor({-1.0F, 0.5F, 1.0F}));
}

TEST(ClipGrad, InfiniteNormIsAnErrorOnlyWhenAsked) {
  const at::Tensor param =
      with_gradient(at::tensor({1.0F, std::numeric_limits<float>::infinity()}));
  EXPECT_TRUE(std::isinf(clip_grad_norm_(param, 1).item<float>()));
  param.mutable_grad() = at::tensor({1.0F, NAN});
  try {
    clip_grad_norm_(param, 1, 2, /*error_if_nonfinite=*/true);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_EQ(
        std::string(error.what_without_backtrace()),
        "clip_grad_norm_: expected a finite total norm of order 2, got nan: some gradient is "
        "not finite; skip the step, or pass error_if_nonfinite = false to scale by it anyway");
  }
  EXPECT_EQ(param.grad()[0].item<float>(), 1);
}

}  // namespace
}  // namespace tessera::optim
