#include <tessera/nn/fp8.h>
#include <tessera/nn/modules.h>

#include "nn/composable.h"
#include "nn/fp8_linear.h"
#include "nn/module_hooks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

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
