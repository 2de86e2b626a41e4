// Operators that work element by element.
#include "dtensor/rules.h"

#include <ATen/ExpandUtils.h>

#include <algorithm>

namespace tessera::dtensor {
namespace {

/// Dimensions of what the operands broadcast to.
int64_t broadcast_ndim(const Call& call) {
  int64_t ndim = 0;
  for (const auto& input : call.inputs()) {
    for (const auto& operand : input.operands) ndim = std::max(ndim, operand.ndim());
  }
  return ndim;
}

/// Where a shard of dimension `dim` of the result (of `ndim`) lies in an operand: the same
/// elements, or all of it if it is broadcast along that dimension.
Placement aligned(const Operand& operand, int64_t dim, int64_t ndim, int64_t size) {
  const int64_t own = dim - (ndim - operand.ndim());
  if (own < 0 || (operand.sizes[own] == 1 && size != 1)) return Replicate();
  return Shard(own);
}

int64_t broadcast_size(const Call& call, int64_t dim, int64_t ndim) {
  for (const auto& input : call.inputs()) {
    for (const auto& operand : input.operands) {
      const int64_t own = dim - (ndim - operand.ndim());
      if (own >= 0 && operand.sizes[own] != 1) return operand.sizes[own];
    }
  }
  return 1;
}

Rows shard_rows(const Call& call) {
  Rows rows;
  const int64_t ndim = broadcast_ndim(call);
  for (int64_t dim = 0; dim < ndim; ++dim) {
    const int64_t size = broadcast_size(call, dim, ndim);
    auto row = call.row(Shard(dim));
    for (size_t i = 0; i < call.input_count(); ++i) {
      if (call.has(i)) row[call.output_count() + i] = aligned(call.operand(i), dim, ndim, size);
    }
    rows.emplace_back(std::move(row));
  }
  return rows;
}

/// A number given as an argument: the other factor, the divisor, alpha.
Number number_at(const Call& call, size_t index) {
  for (const auto& input : call.inputs()) {
    if (input.index == index)
      return input.operands.empty() ? Number::Unknown : input.operands.front().number;
  }
  const auto& value = call.argument(index);
  return value.isScalar() ? number_in(value.toScalar()) : Number::Unknown;
}

bool scales_without_bound(const Call& call) {
  return call.has_argument("alpha") && number_at(call, call.index_of("alpha")) == Number::NotFinite;
}

bool has_fractions(const Operand& operand) {
  return c10::isFloatingType(operand.dtype) || c10::isComplexType(operand.dtype);
}

/// Sums pass: f(a + b) = f(a) + f(b). A number written as such is no summand, since every part
/// would add it; beside an average it may stand.
Rows linear_rows(const Call& call) {
  Rows rows;
  if (scales_without_bound(call)) return rows;
  const auto is_number = [](const TensorArgument& input) {
    return std::any_of(input.operands.begin(), input.operands.end(),
                       [](const Operand& operand) { return !operand.spec; });
  };
  const auto& inputs = call.inputs();
  const bool has_number = std::any_of(inputs.begin(), inputs.end(), is_number);
  for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
    auto row = call.row(Partial(op));
    bool passes = !has_number || op == ReduceOp::AVG;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (is_number(inputs[i])) continue;
      row[call.output_count() + i] = Partial(op);
      // An average of integers is rounded.
      passes = passes && (!has_number || has_fractions(call.operand(i)));
    }
    if (passes) rows.emplace_back(std::move(row));
  }
  return rows;
}

/// The same where the number is no tensor: the average of x + c is that of x, plus c.
Rows shifted_rows(const Call& call) {
  if (scales_without_bound(call) || !has_fractions(call.operand(0))) return {};
  return {{Partial("avg"), Partial("avg")}};
}

/// Products pass in each factor by itself; quotients in the dividend. An infinite factor would make
/// NaN of summands of different signs, where the sum has one. Of factors that are tensors nothing
/// is known; then what is not finite stays so, but inf may become NaN.
Rows scaled_rows(const Call& call, bool is_product) {
  Rows rows;
  const auto other = number_at(call, 1);
  const bool passes_first = other != Number::NotFinite && (is_product || other != Number::Zero);
  const bool passes_second =
      is_product && call.input_count() > 1 && number_at(call, 0) != Number::NotFinite;
  for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
    auto row = call.row(Partial(op));
    row[1] = Partial(op);
    if (passes_first) rows.emplace_back(row);
    if (!passes_second) continue;
    std::swap(row[1], row[2]);
    rows.emplace_back(std::move(row));
  }
  return rows;
}

Rule with_rows(Rows (*extra)(const Call&)) {
  auto rule = pointwise_rule();
  rule.rows = [extra](const Call& call, int64_t) {
    auto rows = shard_rows(call);
    for (auto& row : extra(call)) rows.push_back(std::move(row));
    return rows;
  };
  return rule;
}

const Registration kLinear({"aten::add.Tensor", "aten::sub.Tensor", "aten::add_.Tensor",
                            "aten::sub_.Tensor", "aten::neg", "aten::clone", "aten::detach",
                            "aten::alias", "aten::positive", "aten::real", "aten::imag",
                            "aten::lift_fresh", "tessera::again"},
                           pointwise_rule(/*passes_partial=*/true));

const Registration kShift({"aten::add.Scalar", "aten::sub.Scalar", "aten::rsub.Scalar"},
                          with_rows(shifted_rows));

/// See without_bits: such a view has memory of its own.
Rule resolved_view_rule() {
  auto rule = pointwise_rule(/*passes_partial=*/true);
  rule.run = [](const c10::OperatorHandle& op, const Choice&, const std::vector<Sizes>&,
                torch::jit::Stack& stack) {
    op.callBoxed(stack);
    stack.back() = without_bits(stack.back().toTensor());
  };
  return rule;
}
const Registration kResolvedViews({"aten::_conj", "aten::_neg_view"}, resolved_view_rule());

const Registration kProduct({"aten::mul.Tensor", "aten::mul_.Tensor", "aten::mul.Scalar",
                             "aten::mul_.Scalar"},
                            with_rows([](const Call& call) { return scaled_rows(call, true); }));
const Registration kQuotient({"aten::div.Tensor", "aten::div_.Tensor", "aten::div.Scalar",
                              "aten::div_.Scalar"},
                             with_rows([](const Call& call) { return scaled_rows(call, false); }));
/// Not tagged pointwise, though they are.
const Registration kUntagged({"aten::masked_fill",
                              "aten::native_dropout_backward",
                              "aten::threshold_backward",
                              "aten::leaky_relu_backward",
                              "aten::elu_backward",
                              "aten::softplus_backward",
                              "aten::hardtanh_backward",
                              "aten::hardswish",
                              "aten::hardswish_backward",
                              "aten::hardsigmoid_backward",
                              "aten::gelu_backward",
                              "aten::silu_backward",
                              "aten::mish_backward",
                              "aten::sigmoid_backward",
                              "aten::tanh_backward",
                              "aten::softshrink_backward",
                              "aten::hardshrink_backward",
                              "aten::logit_backward",
                              "aten::log_sigmoid_backward",
                              "aten::_prelu_kernel",
                              "aten::_prelu_kernel_backward",
                              "aten::_masked_scale",
                              "aten::frexp",
                              "aten::xlogy",
                              "aten::nan_to_num",
                              "aten::celu",
                              "aten::selu",
                              "aten::rrelu_with_noise_backward",
                              "aten::polygamma"},
                             pointwise_rule());

}  // namespace

Rule pointwise_rule(bool passes_partial) {
  Rule rule;
  rule.rows = [passes_partial](const Call& call, int64_t) {
    auto rows = shard_rows(call);
    if (passes_partial) {
      for (auto& row : linear_rows(call)) rows.push_back(std::move(row));
    }
    return rows;
  };
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.shapes = [](const Call& call) {
    Sizes sizes;
    const int64_t ndim = broadcast_ndim(call);
    for (int64_t dim = 0; dim < ndim; ++dim) sizes.push_back(broadcast_size(call, dim, ndim));
    for (const auto& input : call.inputs()) {
      for (const auto& operand : input.operands) {
        if (!at::is_expandable_to(operand.sizes, sizes)) return std::vector<Sizes>();
      }
    }
    return std::vector<Sizes>(call.output_count(), sizes);
  };
  return rule;
}

}  // namespace tessera::dtensor
