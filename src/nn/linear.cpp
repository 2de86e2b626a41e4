#include <tessera/nn/plain_forward.h>

#include "nn/fp8_linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera::nn::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// at::linear in the dtype of `input`, 16 bits, with parameters in fp32. Autocast casts parameters
/// by operators of their own, so their gradients are rounded to 16 bits and cast back, a kernel for
/// each; here the products and sums that make them write fp32.
class LowPrecisionLinear : public torch::autograd::Function<LowPrecisionLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    const auto dtype = input.scalar_type();
    const auto low = weight.to(dtype);
    context->save_for_backward({input, low});
    context->saved_data["weight"] = weight;
    context->saved_data["version"] = static_cast<int64_t>(weight._version());
    context->saved_data["has_bias"] = bias.has_value();
    return at::linear(input, low, bias ? bias->to(dtype) : at::Tensor());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto& input = saved[0];
    const auto& low = saved[1];
    const auto weight = context->saved_data["weight"].toTensor();
    const auto dtype = weight.scalar_type();
    const auto& gradient = gradients[0];
    const auto rows = gradient.reshape({-1, gradient.size(-1)});
    const auto inputs = input.reshape({-1, input.size(-1)});
    // A graph of the backward needs operators that can be differentiated, of what they came from.
    const bool is_graph_made = at::GradMode::is_enabled();
    TORCH_CHECK(!is_graph_made || weight._version() == context->saved_data["version"].toInt(),
                "Linear: a backward with create_graph after the weight was written in place; "
                "expected it as it was in the forward: write a copy, or after the backward");

    variable_list results(3);
    if (context->needs_input_grad(0))
      results[0] = gradient.matmul(is_graph_made ? weight.to(input.scalar_type()) : low);
    if (context->needs_input_grad(1)) {
      results[1] =
          is_graph_made ? at::mm(rows.t(), inputs).to(dtype) : at::mm(rows.t(), inputs, dtype);
    }
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2))
      results[2] = sum_of_rows(rows, dtype);
    return results;
  }
};

bool takes_low_precision(const at::Tensor& input, const at::Tensor& weight) {
  // What is distributed or fake has no memory.
  return weight.is_cuda() && input.is_cuda() && weight.has_storage() && input.has_storage() &&
         weight.scalar_type() == at::kFloat && input.is_floating_point() && input.dim() >= 2 &&
         input.numel() > 0 && input.size(-1) == weight.size(1) && at::GradMode::is_enabled() &&
         weight.requires_grad() && at::autocast::is_autocast_enabled(at::kCUDA) &&
         at::autocast::get_autocast_dtype(at::kCUDA) != at::kFloat;
}

}  // namespace

// Of many rows the product with ones takes two thirds of a reduction's time, and one small kernel
// more.
at::Tensor sum_of_rows(const at::Tensor& rows, at::ScalarType dtype) {
  constexpr int64_t kMany = int64_t{1} << 22;
  const bool takes_product = rows.is_cuda() && rows.scalar_type() != dtype && dtype == at::kFloat;
  if (rows.numel() < kMany || !takes_product || at::GradMode::is_enabled())
    return rows.sum({0}, /*keepdim=*/false, dtype);
  return at::mm(at::ones_like(rows.narrow(1, 0, 1)).t(), rows, dtype).squeeze(0);
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  if (!takes_low_precision(input, weight)) return at::linear(input, weight, bias);
  const auto low = input.to(at::autocast::get_autocast_dtype(at::kCUDA));
  return LowPrecisionLinear::apply(low, weight,
                                   bias.defined() ? std::optional(bias) : std::nullopt);
}

}  // namespace tessera::nn::detail
