#include <tessera/detail/nn/plain_forward.h>

#include "base/capture.h"
#include "nn/fp8.h"
#include "nn/row_kernels.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
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

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

RunRowOperator row_kernels = nullptr;

/// at::layer_norm over the last dimension, whose gradients one pass over the rows makes. ATen's
/// takes three, two of them for weight and bias.
class RowNorm : public torch::autograd::Function<RowNorm> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias, double eps) {
    const auto columns = weight.numel();
    const auto rows = input.reshape({-1, columns});
    const std::vector<int64_t> of_row = {rows.size(0), 1};
    const auto found =
        run_rows({.name = "aten::native_layer_norm",
                  .arguments = {rows, std::vector<int64_t>{columns}, weight, bias, eps},
                  .results = {{input.scalar_type(), rows.sizes().vec()},
                              {at::kFloat, of_row},
                              {at::kFloat, of_row}}});
    at::Tensor y, mean, rstd;
    if (found) {
      y = found->at(0), mean = found->at(1), rstd = found->at(2);
    } else {
      std::tie(y, mean, rstd) = at::native_layer_norm(rows, {columns}, weight, bias, eps);
    }
    // In the order and shapes of ATen's node: a recomputation may have the other one.
    auto per_row = input.sizes().vec();
    per_row.back() = 1;
    context->save_for_backward({bias, input, weight, mean.view(per_row), rstd.view(per_row)});
    return at::_unsafe_view(y, input.sizes());  // whoever gets it may write to it
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &bias = saved[0], &input = saved[1], &weight = saved[2];
    const auto mean = saved[3].view({-1, 1}), rstd = saved[4].view({-1, 1});
    const auto columns = weight.numel();
    const auto rows = input.reshape({-1, columns});
    const auto gradient = gradients[0].reshape({-1, columns});
    const std::array<bool, 3> mask = {context->needs_input_grad(0), context->needs_input_grad(1),
                                      context->needs_input_grad(2)};
    const std::vector<int64_t> shape = {columns};
    const auto dtype = input.scalar_type();
    std::optional<std::vector<at::Tensor>> found;
    if (mask[0] && mask[1] && mask[2])
      found = run_rows({.name = "aten::native_layer_norm_backward",
                        .arguments = {gradient, rows, shape, mean, rstd, weight, bias,
                                      c10::List<bool>({true, true, true})},
                        .results = {{dtype, rows.sizes().vec()}, {dtype, shape}, {dtype, shape}}});
    if (!found) {
      const auto [of_input, of_weight, of_bias] =
          at::native_layer_norm_backward(gradient, rows, shape, mean, rstd, weight, bias, mask);
      found = {of_input, of_weight, of_bias};
    }
    auto& of_input = found->at(0);
    return {of_input.defined() ? at::_unsafe_view(of_input, input.sizes()) : of_input, found->at(1),
            found->at(2), at::Tensor()};
  }
};

bool is_plain_cuda(const at::Tensor& tensor) {
  // Functions of ours have no forward derivatives.
  return tensor.defined() && has_row_kernels(tensor) && !tensor._fw_grad(/*level=*/0).defined();
}

/// Whether kernels over rows are worth it: of few numbers ATen's are as fast, and written already.
bool takes_rows(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  constexpr int64_t kMany = int64_t{1} << 20;
  return is_plain_cuda(input) && is_plain_cuda(weight) && is_plain_cuda(bias) &&
         weight.dim() == 1 && input.dim() >= 2 && input.size(-1) == weight.size(0) &&
         input.numel() >= kMany && input.is_contiguous() && at::GradMode::is_enabled() &&
         weight.requires_grad() && bias.requires_grad() &&
         weight.scalar_type() == bias.scalar_type() && weight.is_contiguous() &&
         bias.is_contiguous() && weight.scalar_type() != at::kDouble;
}

}  // namespace

void set_row_kernels(RunRowOperator run) { row_kernels = run; }

bool has_row_kernels(const at::Tensor& tensor) {
  // What is distributed or fake has no memory.
  return row_kernels != nullptr && capture::observer() == nullptr && tensor.is_cuda() &&
         tensor.has_storage();
}

std::optional<std::vector<at::Tensor>> run_rows(const RowOperator& op) {
  if (at::GradMode::is_enabled() || capture::observer() != nullptr) return std::nullopt;
  return row_kernels(op);
}

at::Tensor layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                      const at::Tensor& weight, const at::Tensor& bias, double eps) {
  if (takes_rows(input, weight, bias)) {
    const bool is_widened = at::autocast::is_autocast_enabled(at::kCUDA);
    const auto x = is_widened ? input.to(at::kFloat) : input;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (x.scalar_type() == weight.scalar_type()) return RowNorm::apply(x, weight, bias, eps);
  }
  return at::layer_norm(input, normalized_shape, weight, bias, eps);
}

}  // namespace tessera::nn::detail
