#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

using Unary = at::Tensor (*)(const at::Tensor&);
using Binary = at::Tensor (*)(const at::Tensor&, const at::Tensor&);

Case unary(const char* name, Unary function, Input input = {5, 4}) {
  return {
      name, {std::move(input)}, [function](const Tensors& x) { return Tensors{function(x[0])}; }};
}

Case binary(const char* name, Binary function, Input left = {5, 4}, Input right = {5, 4}) {
  return {name, {std::move(left), std::move(right)}, [function](const Tensors& x) {
            return Tensors{function(x[0], x[1])};
          }};
}

const Cases kUnary(
    "pointwise",
    {
        unary("abs", at::abs),
        unary("relu", at::relu),
        unary("exp", at::exp),
        unary("log", at::log, positive({5, 4})),
        unary("sqrt", at::sqrt, positive({5, 4})),
        unary("rsqrt", at::rsqrt, positive({5, 4})),
        unary("sigmoid", at::sigmoid),
        unary("tanh", at::tanh),
        unary("neg", at::neg),
        unary("sin", at::sin),
        unary("cos", at::cos),
        unary("silu", at::silu),
        unary("erf", at::erf),
        unary("floor", at::floor),
        unary("sign", at::sign),
        unary("square", at::square),
        unary("reciprocal", at::reciprocal, positive({5, 4})),
        unary("log1p", at::log1p, positive({5, 4})),
        unary("expm1", at::expm1),
        unary("tan", at::tan, unit({5, 4})),
        unary("gelu", [](const at::Tensor& x) { return at::gelu(x); }),
        unary("gelu_tanh", [](const at::Tensor& x) { return at::gelu(x, "tanh"); }),
        unary("leaky_relu", [](const at::Tensor& x) { return at::leaky_relu(x, 0.1); }),
        unary("elu", [](const at::Tensor& x) { return at::elu(x); }),
        unary("softplus", [](const at::Tensor& x) { return at::softplus(x); }),
        unary("hardtanh", [](const at::Tensor& x) { return at::hardtanh(x); }),
        unary("hardswish", at::hardswish),
        unary("hardsigmoid", at::hardsigmoid),
        unary("mish", at::mish),
        unary("clamp", [](const at::Tensor& x) { return at::clamp(x, -0.5, 0.5); }),
        unary(
            "pow_scalar", [](const at::Tensor& x) { return at::pow(x, 2.5); }, positive({5, 4})),
        unary("add_scalar", [](const at::Tensor& x) { return x + 3; }),
        unary("rsub_scalar", [](const at::Tensor& x) { return 3 - x; }),
        unary("mul_scalar", [](const at::Tensor& x) { return x * 3; }),
        unary("sub_scalar", [](const at::Tensor& x) { return x - 3; }),
        unary("rsub_alpha", [](const at::Tensor& x) { return at::rsub(x, 3, 2); }),
        unary("div_scalar", [](const at::Tensor& x) { return x / 3; }),
        unary("clone", [](const at::Tensor& x) { return x.clone(); }),
        unary("double", [](const at::Tensor& x) { return x.to(at::kDouble); }),
        unary("inplace_chain", [](const at::Tensor& x) { return (x * 1.0).mul_(2).div_(3); }),
        unary("three_dims", at::tanh, {3, 2, 5}),
        unary("one_row", at::tanh, {1, 4}),
        unary("nothing", at::tanh, {0, 4}),
        unary("scalar", at::tanh, Input(std::vector<int64_t>{}, Input::Kind::Normal)),
    });

const Cases kBinary("pointwise", {
    binary("add", [](const at::Tensor& a, const at::Tensor& b) { return a + b; }),
    binary("sub", [](const at::Tensor& a, const at::Tensor& b) { return a - b; }),
    binary("add_alpha", [](const at::Tensor& a, const at::Tensor& b) { return at::add(a, b, 2.5); }),
    binary("mul", [](const at::Tensor& a, const at::Tensor& b) { return a * b; }),
    binary("div", [](const at::Tensor& a, const at::Tensor& b) { return a / b; }, {5, 4}, positive({5, 4})),
    binary("broadcast_row", [](const at::Tensor& a, const at::Tensor& b) { return a * b; }, {5, 4}, {4}),
    binary("broadcast_column", [](const at::Tensor& a, const at::Tensor& b) { return a + b; }, {5, 4}, {5, 1}),
    binary("broadcast_both", [](const at::Tensor& a, const at::Tensor& b) { return a - b; }, {5, 1}, {1, 4}),
    binary("broadcast_3d", [](const at::Tensor& a, const at::Tensor& b) { return a * b; }, {2, 3, 4}, {3, 1}),
    binary("maximum", at::maximum, distinct({5, 4}), {5, 4}),
    binary("minimum", at::minimum, distinct({5, 4}), {5, 4}),
    binary("atan2", at::atan2), binary("hypot", at::hypot),
    binary("pow", [](const at::Tensor& a, const at::Tensor& b) { return at::pow(a, b); }, positive({5, 4}), {5, 4}),
    binary("lerp", [](const at::Tensor& a, const at::Tensor& b) { return at::lerp(a, b, 0.3); }),
    binary("logaddexp", at::logaddexp),
    {"where", {boolean({5, 4}), {5, 4}, {5, 4}}, [](const Tensors& x) { return Tensors{at::where(x[0], x[1], x[2])}; }},
    {"addcmul", {{5, 4}, {5, 4}, {5, 4}}, [](const Tensors& x) { return Tensors{at::addcmul(x[0], x[1], x[2], 0.5)}; }},
    {"addcdiv", {{5, 4}, {5, 4}, positive({5, 4})}, [](const Tensors& x) { return Tensors{at::addcdiv(x[0], x[1], x[2], 0.5)}; }},
    {"masked_fill", {{5, 4}, boolean({5, 4})}, [](const Tensors& x) { return Tensors{at::masked_fill(x[0], x[1], 2.0)}; }},
    {"comparisons", {{5, 4}, {5, 4}}, [](const Tensors& x) { return Tensors{x[0] > x[1], x[0].le(x[1]), x[0].eq(x[0]), x[0].ne(x[1])}; }, false},
    {"logic", {boolean({5, 4}), boolean({4})}, [](const Tensors& x) { return Tensors{x[0].logical_and(x[1]), x[0].bitwise_or(x[1]), x[0].logical_not()}; }, false},
    {"integers", {index({5, 4}, 9), index({5, 4}, 9)}, [](const Tensors& x) { return Tensors{x[0] + x[1], x[0] * x[1], at::bitwise_xor(x[0], x[1])}; }, false},
});

const Cases kMatrix(
    "matrix",
    {
        {"mm", {{5, 4}, {4, 3}}, [](const Tensors& x) { return Tensors{x[0].mm(x[1])}; }},
        {"mm_transposed",
         {{5, 4}, {3, 4}},
         [](const Tensors& x) { return Tensors{x[0].mm(x[1].t())}; }},
        {"addmm",
         {{3}, {5, 4}, {4, 3}},
         [](const Tensors& x) { return Tensors{at::addmm(x[0], x[1], x[2])}; }},
        {"addmm_2d",
         {{5, 3}, {5, 4}, {4, 3}},
         [](const Tensors& x) { return Tensors{at::addmm(x[0], x[1], x[2], 0.5, 2)}; }},
        {"bmm", {{3, 5, 4}, {3, 4, 2}}, [](const Tensors& x) { return Tensors{x[0].bmm(x[1])}; }},
        {"baddbmm",
         {{3, 5, 2}, {3, 5, 4}, {3, 4, 2}},
         [](const Tensors& x) { return Tensors{at::baddbmm(x[0], x[1], x[2])}; }},
        {"mv", {{5, 4}, {4}}, [](const Tensors& x) { return Tensors{x[0].mv(x[1])}; }},
        {"dot", {{7}, {7}}, [](const Tensors& x) { return Tensors{x[0].dot(x[1])}; }},
        {"linear",
         {{5, 4}, {3, 4}, {3}},
         [](const Tensors& x) { return Tensors{at::linear(x[0], x[1], x[2])}; }},
        {"linear_3d",
         {{2, 5, 4}, {3, 4}, {3}},
         [](const Tensors& x) { return Tensors{at::linear(x[0], x[1], x[2])}; }},
        {"matmul_4d",
         {{2, 3, 5, 4}, {2, 3, 4, 2}},
         [](const Tensors& x) { return Tensors{at::matmul(x[0], x[1])}; }},
    });

const Cases kUntagged(
    "pointwise",
    {
        unary("celu", [](const at::Tensor& x) { return at::celu(x, 1.5); }),
        unary("selu", at::selu),
        unary("hardshrink", [](const at::Tensor& x) { return at::hardshrink(x, 0.3); }),
        unary("softshrink", [](const at::Tensor& x) { return at::softshrink(x, 0.3); }),
        unary(
            "logit", [](const at::Tensor& x) { return at::logit(x, 0.01); }, unit({5, 4})),
        unary(
            "polygamma", [](const at::Tensor& x) { return at::polygamma(1, x); }, positive({5, 4})),
        unary("nan_to_num",
              [](const at::Tensor& x) { return at::nan_to_num(x / at::relu(x), 3, 5, 7) * x; }),
        binary("xlogy", at::xlogy, {5, 4}, positive({5, 4})),
        binary(
            "masked_fill",
            [](const at::Tensor& x, const at::Tensor& mask) { return x.masked_fill(mask, 3); },
            {5, 4}, boolean({5, 4})),
        binary(
            "masked_fill_broadcast",
            [](const at::Tensor& x, const at::Tensor& mask) { return x.masked_fill(mask, 3); },
            {5, 4}, boolean({4})),
        {"masked_fill_by_tensor",
         {{5, 4}, boolean({5, 4}), {}},
         [](const Tensors& x) { return Tensors{x[0].masked_fill(x[1], x[2])}; }},
        binary("add_in_place",
               [](const at::Tensor& x, const at::Tensor& y) { return x.clone().add_(y, 2); }),
        binary("prelu", [](const at::Tensor& x, const at::Tensor& y) { return at::prelu(x, y); },
               {5, 4}, {4}),
        {"frexp",
         {{5, 4}},
         [](const Tensors& x) {
           const auto [mantissa, exponent] = at::frexp(x[0]);
           return Tensors{mantissa, exponent};
         },
         /*backward=*/false},
        {"rrelu_with_noise_backward",
         {{5, 4}, {5, 4}, unit({5, 4})},
         [](const Tensors& x) {
           return Tensors{at::rrelu_with_noise_backward(x[0], x[1], x[2], 0.1, 0.3, true, false)};
         },
         /*backward=*/false},
    });

}  // namespace
}  // namespace tessera::brute_force
