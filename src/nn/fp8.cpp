#include "nn/fp8.h"

#include <tessera/detail/nn/plain_forward.h>
#include <tessera/nn/fp8.h>
#include <tessera/nn/modules.h>

#include "nn/composable.h"
#include "nn/module_hooks.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace tessera::nn::detail {

// The three products of a linear layer in float8. See Note [scaled products].

namespace {

// Note [scaled products]
// at::_scaled_mm multiplies a row-major by a column-major float8 matrix and the sums by a scale of
// each. A tensor is cast as x / scale, where scale = amax / (the largest float8 number): what is
// largest becomes that number, so a cast with the tensor's own amax can't overflow.
//   output          = input    [rows, in]  · weightᵀ [in, out]
//   input gradient  = gradient [rows, out] · weight  [out, in]
//   weight gradient = gradientᵀ [out, rows] · input  [rows, in]
// Tensorwise all three are in float8. Gradients have a wider range than the rest and take e5m2; the
// input is kept for backward in 8 bits. Rowwise a scale belongs to a row of the left or a column of
// the right matrix, never to the contracted dimension, so each product needs casts of its own; the
// weight's gradient, which sums over all rows, stays in 16 bits.
// The weight is cast again in backward: what is kept then is the parameter, which fully_shard
// frees in between, not a copy.
// Scales stay tensors: the host reads nothing. An amax that is not finite makes the scale so, and
// with it every result; Delayed, which saturates, puts NaN into the scale of the product.

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kE4m3 = at::kFloat8_e4m3fn;
constexpr auto kE5m2 = at::kFloat8_e5m2;
// Scales of zeros, and of what is next to zero, stay finite, and so do their inverses.
constexpr double kSmallestAmax = 1e-12;

double largest_of(at::ScalarType dtype) { return dtype == kE4m3 ? 448.0 : 57344.0; }

/// values * scale are the numbers that were cast.
struct Cast {
  at::Tensor values;  // row-major
  at::Tensor scale;   // [1], or [rows, 1]
};

at::Tensor scale_of(const at::Tensor& amax, at::ScalarType dtype) {
  return amax.clamp_min(kSmallestAmax) / largest_of(dtype);
}

/// Scales are 1-D or 2-D, so the quotient is fp32 whatever the dtype of `numbers`.
at::Tensor divided(const at::Tensor& numbers, const at::Tensor& scale) {
  return numbers * scale.reciprocal();
}

at::Tensor amax_of_tensor(const at::Tensor& numbers) {
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  return at::linalg_vector_norm(numbers, kInfinity, {}, /*keepdim=*/false, at::kFloat).view({1});
}

Cast cast_rows(const at::Tensor& numbers) {
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  const auto amax = at::linalg_vector_norm(numbers, kInfinity, {1}, /*keepdim=*/true, at::kFloat);
  const auto scale = scale_of(amax, kE4m3);
  return {divided(numbers, scale).to(kE4m3).contiguous(), scale};
}

/// Delayed scales may be too small for the tensor: what is beyond saturates.
Cast cast_with_scale(const at::Tensor& numbers, const at::Tensor& scale, at::ScalarType dtype,
                     Fp8Amax mode) {
  const auto largest = largest_of(dtype);
  auto values = divided(numbers, scale);
  if (mode == Fp8Amax::Delayed) values = values.clamp(-largest, largest);
  return {values.to(dtype).contiguous(), scale};
}

/// With the tensor's own amax, or with that of earlier calls, where there are some.
Cast cast_tensor(const at::Tensor& numbers, at::ScalarType dtype, Fp8Amax mode,
                 AmaxHistory& history) {
  const auto amax = amax_of_tensor(numbers);
  if (mode == Fp8Amax::Current) return cast_with_scale(numbers, scale_of(amax, dtype), dtype, mode);
  const auto known = history.values(numbers).amax({0}, /*keepdim=*/true);
  const auto scale = scale_of(at::where(known > 0, known, amax), dtype);
  auto cast = cast_with_scale(numbers, scale, dtype, mode);
  history.push(at::where(at::isfinite(amax), amax, 0.0));
  cast.scale = cast.scale + (amax - amax);  // NaN unless the amax is finite
  return cast;
}

/// Of one scale for all.
Cast transposed(const Cast& cast) { return {cast.values.t().contiguous(), cast.scale}; }

/// [rows, columns], of which `right` has the columns as rows.
at::Tensor product(const Cast& left, const Cast& right, at::ScalarType dtype, bool is_fast,
                   const std::optional<at::Tensor>& bias = std::nullopt) {
  const auto scale = right.scale.dim() == 2 ? right.scale.t() : right.scale;
  return at::_scaled_mm(left.values, right.values.t(), left.scale, scale, bias, std::nullopt, dtype,
                        is_fast);
}

/// Rowwise products write bf16 alone.
at::ScalarType dtype_of_product(const Fp8Layer& layer, at::ScalarType wanted) {
  return layer.scaling == Fp8Scaling::Rowwise ? at::kBFloat16 : wanted;
}

/// gradientᵀ · input in `dtype`, summed in fp32.
at::Tensor wide_product(const at::Tensor& gradient, const at::Tensor& input, at::ScalarType dtype) {
  if (input.is_cuda() && dtype == at::kFloat && input.scalar_type() != dtype)
    return at::mm(gradient.t(), input, dtype);
  if (dtype == at::kFloat) return at::mm(gradient.t().to(dtype), input.to(dtype));
  return at::mm(gradient.t(), input).to(dtype);
}

/// Rows are a multiple of 16.
class Fp8Linear : public torch::autograd::Function<Fp8Linear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const Fp8LayerPtr& layer) {
    const bool is_rowwise = layer->scaling == Fp8Scaling::Rowwise;
    const auto inputs =
        is_rowwise ? cast_rows(input) : cast_tensor(input, kE4m3, layer->amax, layer->input);
    const auto weights =
        is_rowwise ? cast_rows(weight) : cast_tensor(weight, kE4m3, layer->amax, layer->weight);
    const bool is_weight_trained = weight.requires_grad();
    const auto& kept = is_rowwise ? input : inputs.values;
    context->save_for_backward(
        {is_weight_trained ? kept : at::Tensor(), weight, inputs.scale, weights.scale});
    context->saved_data["layer"] = c10::IValue::make_capsule(layer);
    context->saved_data["dtype"] = static_cast<int64_t>(input.scalar_type());
    if (bias) context->saved_data["bias_dtype"] = static_cast<int64_t>(bias->scalar_type());

    const auto dtype = dtype_of_product(*layer, input.scalar_type());
    // A GPU's products that write fp32 add no bias.
    const bool is_bias_added = bias && dtype != at::kFloat;
    const auto added = is_bias_added ? std::optional(bias->to(dtype)) : std::nullopt;
    auto output = product(inputs, weights, dtype, /*is_fast=*/true, added).to(input.scalar_type());
    return bias && !is_bias_added ? output + *bias : output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                                "fp8: expected a backward without create_graph, since its products "
                                "can't be differentiated twice; leave fp8 out for that");
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = context->get_saved_variables();
    auto& layer =
        *c10::static_intrusive_pointer_cast<Fp8Layer>(context->saved_data["layer"].toCapsule());
    const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    const auto& gradient = gradients[0];
    const auto& weight = saved[1];

    variable_list results(4);
    const bool of_input = context->needs_input_grad(0), of_weight = context->needs_input_grad(1);
    if (layer.scaling == Fp8Scaling::Rowwise) {
      if (of_input)
        results[0] = product(cast_rows(gradient), cast_rows(weight.t()), at::kBFloat16,
                             /*is_fast=*/false)
                         .to(dtype);
      if (of_weight) results[1] = wide_product(gradient, saved[0], weight.scalar_type());
    } else if (of_input || of_weight) {
      const auto cast = cast_tensor(gradient, kE5m2, layer.amax, layer.gradient);
      if (of_input)
        results[0] =
            product(cast, transposed(cast_with_scale(weight, saved[3], kE4m3, layer.amax)), dtype,
                    /*is_fast=*/false);
      if (of_weight)
        results[1] =
            product(transposed(cast), transposed({saved[0], saved[2]}), weight.scalar_type(),
                    /*is_fast=*/false);
    }
    if (context->saved_data.count("bias_dtype") > 0 && context->needs_input_grad(2)) {
      const auto bias = static_cast<at::ScalarType>(context->saved_data["bias_dtype"].toInt());
      results[2] = sum_of_rows(gradient, bias);
    }
    return results;
  }
};

bool is_low_or_single(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

}  // namespace

at::Tensor& AmaxHistory::values(const at::Tensor& like) {
  const c10::InferenceMode normal(false);  // later calls, which train, write to it
  const auto options = like.options().dtype(at::kFloat);
  if (!values_.defined() || values_.is_meta()) values_ = at::zeros({length_}, options);
  if (values_.device() != like.device()) values_ = values_.to(like.device());
  return values_;
}

void AmaxHistory::push(const at::Tensor& amax) {
  values_.copy_(at::cat({amax, values_.narrow(0, 0, length_ - 1)}));
}

at::Tensor fp8_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                      const Fp8LayerPtr& layer) {
  const auto device = input.device().type();
  const bool is_autocast = at::autocast::is_autocast_enabled(device);
  const auto dtype = is_autocast ? at::autocast::get_autocast_dtype(device) : input.scalar_type();
  // What does not fit gets linear's own result, or error.
  const bool fits = input.dim() >= 1 && input.size(-1) == weight.size(1) && input.numel() > 0 &&
                    is_low_or_single(input.scalar_type()) && is_low_or_single(dtype) &&
                    (is_autocast || dtype == weight.scalar_type());
  if (!fits) return linear(input, weight, bias);

  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto rows = input.to(dtype).reshape({-1, input.size(-1)});
  const auto count = rows.size(0);
  const auto missing = (kFp8Multiple - count % kFp8Multiple) % kFp8Multiple;
  if (missing > 0) rows = at::constant_pad_nd(rows, {0, 0, 0, missing});
  auto output =
      Fp8Linear::apply(rows, weight, bias.defined() ? std::optional(bias) : std::nullopt, layer);
  if (missing > 0) output = output.narrow(0, 0, count);
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return output.reshape(sizes);
}

void try_fp8_product(c10::Device device, Fp8Scaling scaling) {
  const at::NoGradGuard no_grad;
  const auto zeros = at::zeros({kFp8Multiple, kFp8Multiple}, at::TensorOptions(device));
  AmaxHistory none(1);
  const auto cast = scaling == Fp8Scaling::Rowwise
                        ? cast_rows(zeros)
                        : cast_tensor(zeros, kE4m3, Fp8Amax::Current, none);
  product(cast, cast, at::kBFloat16, /*is_fast=*/true);
}

}  // namespace tessera::nn::detail

namespace tessera::nn {
namespace {

constexpr const char* kFunction = "fp8";

struct LayerState final : ComposableState {
  explicit LayerState(const Fp8Options& options)
      : layer(c10::make_intrusive<detail::Fp8Layer>(options)) {}
  detail::Fp8LayerPtr layer;
};

struct NamedLayer {
  std::string name;
  torch::nn::LinearImpl* layer;
};

void check_options(const Fp8Options& options) {
  TORCH_CHECK_VALUE(options.history >= 1, kFunction,
                    ": expected a history of at least 1 call, got ", options.history);
  TORCH_CHECK_VALUE(
      options.scaling == Fp8Scaling::Tensorwise || options.amax == Fp8Amax::Current, kFunction,
      ": expected Fp8Amax::Current with Fp8Scaling::Rowwise, got Delayed: the rows of one call are "
      "not those of the next; take Current, or Tensorwise");
}

bool is_multiple(const torch::nn::LinearImpl& layer) {
  return layer.options.in_features() % detail::kFp8Multiple == 0 &&
         layer.options.out_features() % detail::kFp8Multiple == 0;
}

/// Each once, though a module may be registered under two names.
std::vector<NamedLayer> find_layers(torch::nn::Module& module, const Fp8Options& options) {
  std::vector<NamedLayer> found;
  int64_t linear = 0, ours = 0, fitting = 0;
  const auto add = [&](const std::string& name, torch::nn::Module& part) {
    auto* layer = dynamic_cast<torch::nn::LinearImpl*>(&part);
    if (layer == nullptr) return;
    ++linear;
    // One that is derived from it may compute more.
    if (dynamic_cast<Hooked<torch::nn::LinearImpl>*>(layer) == nullptr) return;
    ++ours;
    if (!is_multiple(*layer)) return;
    ++fitting;
    if (options.filter && !options.filter(name, *layer)) return;
    const bool is_known =
        std::ranges::any_of(found, [&](const auto& other) { return other.layer == layer; });
    if (!is_known) found.push_back({name, layer});
  };
  add("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    add(item.key(), *item.value());
  TORCH_CHECK_VALUE(!found.empty(), kFunction,
                    ": expected a tessera::nn::Linear whose sizes are multiples of ",
                    detail::kFp8Multiple, " in ", name_of(module), ", got ", linear,
                    " linear layers, ", ours, " of them tessera::nn's, ", fitting,
                    " of these of such sizes, and none that the filter takes; use "
                    "tessera::nn::Linear, pad its sizes, or leave fp8 out");
  return found;
}

void check_layer(const NamedLayer& named, const Fp8Options& options) {
  check_contract(*named.layer, {kFunction});
  const auto& weight = named.layer->weight;
  const auto dtype = weight.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, kFunction,
                   ": expected weights of float32, bfloat16 or float16, got ", dtype, " in '",
                   named.name, "'; cast the module, or leave that layer out by the filter");
  if (weight.is_meta()) return;  // the first call says
  try {
    detail::try_fp8_product(weight.device(), options.scaling);
  } catch (const c10::Error& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, kFunction,
                                ": expected a GPU of compute capability 8.9 or later, or a CPU, "
                                "got ",
                                weight.device(), " for '", named.name,
                                "'; train in bf16 there: ", error.what_without_backtrace());
  }
}

at::Tensor run(const torch::nn::LinearImpl& linear, const at::Tensor& input,
               const detail::Fp8LayerPtr& layer) {
  constexpr auto kDTensor = c10::DispatchKey::PrivateUse3;  // its folder is above this one
  TORCH_CHECK_NOT_IMPLEMENTED(
      !linear.weight.key_set().has(kDTensor) && !input.key_set().has(kDTensor), kFunction,
      ": expected plain tensors in a layer with fp8, got a DTensor of parallelize_module; leave "
      "that layer out by the filter");
  return detail::fp8_linear(input, linear.weight, linear.bias, layer);
}

}  // namespace

void apply_fp8(torch::nn::Module& module, const Fp8Options& options) {
  check_options(options);
  const auto layers = find_layers(module, options);
  for (const auto& named : layers) check_layer(named, options);
  for (const auto& named : layers) {
    apply_composable(*named.layer, {kFunction}, [&] {
      auto state = std::make_shared<LayerState>(options);
      find_hook_point(*named.layer)
          ->hooks()
          .exchange_stand_in(
              [layer = state->layer](torch::nn::Module& called, Arguments& arguments) {
                return run(dynamic_cast<torch::nn::LinearImpl&>(called), arguments.tensor(0),
                           layer);
              },
              /*for_good=*/true);
      return state;
    });
  }
}

}  // namespace tessera::nn
