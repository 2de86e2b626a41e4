// Adapters of linear layers: made, called and merged.
#include <tessera/dtensor.h>
#include <tessera/lora.h>

#include "base/text.h"
#include "dtensor/part.h"
#include "lora/adapters.h"
#include "nn/module_hooks.h"
#include "parallel/pattern.h"
#include "replicate/init.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <unordered_set>

namespace tessera {
namespace detail::lora {

LoraMatrixImpl::LoraMatrixImpl(const at::Tensor& values) : torch::nn::Module("LoraMatrix") {
  weight = register_parameter("weight", values);
}

double LoraLayer::scale() const {
  const auto rows = static_cast<double>(rank);
  return alpha / (rslora ? std::sqrt(rows) : rows);
}

std::vector<AdaptedLayer> adapted_layers(torch::nn::Module& module) {
  std::vector<AdaptedLayer> found;
  const auto add = [&](const std::string& name, torch::nn::Module& part) {
    auto state = std::dynamic_pointer_cast<LoraLayer>(nn::find_state(part, kName));
    const bool is_known =
        std::ranges::any_of(found, [&](const auto& other) { return other.state == state; });
    if (state && !is_known)
      found.push_back({name, dynamic_cast<torch::nn::LinearImpl*>(&part), std::move(state)});
  };
  add("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    add(item.key(), *item.value());
  return found;
}

std::vector<AdaptedLayer> require_adapted(const char* function, torch::nn::Module& module) {
  auto found = adapted_layers(module);
  TORCH_CHECK_VALUE(!found.empty(), function, ": expected a module with adapters, got ",
                    nn::name_of(module), " without any; call lora first");
  return found;
}

std::string parameter_name(const AdaptedLayer& layer, const char* matrix) {
  return (layer.name.empty() ? "" : layer.name + ".") + matrix + ".weight";
}

std::vector<std::string> adapter_names(torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& layer : adapted_layers(module)) {
    names.push_back(parameter_name(layer, kA));
    names.push_back(parameter_name(layer, kB));
  }
  return names;
}

bool is_target(const std::string& pattern, const std::string& name) {
  for (size_t at = 0;;) {
    if (parallel::matches(pattern, std::string_view(name).substr(at))) return true;
    at = name.find('.', at);
    if (at == std::string::npos) return false;
    ++at;
  }
}

namespace {

struct NamedLayer {
  std::string name;
  torch::nn::LinearImpl* layer;
};

void check_options(const LoraOptions& options) {
  TORCH_CHECK_VALUE(options.rank >= 1, kName, ": expected a rank of at least 1, got ",
                    options.rank);
  TORCH_CHECK_VALUE(std::isfinite(options.alpha), kName, ": expected a finite alpha, got ",
                    options.alpha);
  TORCH_CHECK_VALUE(options.dropout >= 0 && options.dropout < 1, kName,
                    ": expected a dropout from 0 to below 1, got ", options.dropout);
  TORCH_CHECK_TYPE(!options.dtype || at::isFloatingType(*options.dtype), kName,
                   ": expected a floating-point dtype for adapters, got ",
                   options.dtype.value_or(at::kFloat));
}

/// An engine has listed parameters already: adapters would be no part of it.
void check_engines(torch::nn::Module& module) {
  for (const auto& part : module.named_modules("", /*include_self=*/true)) {
    for (const char* engine : {"replicate", "fully_shard"}) {
      TORCH_CHECK_VALUE(!nn::find_state(*part.value(), engine), kName, ": expected ",
                        nn::name_of(module), " without ", engine, ", which is applied to ",
                        part.key().empty() ? nn::name_of(module) : "'" + part.key() + "'",
                        "; call lora first, then ", engine);
    }
  }
}

std::vector<NamedLayer> linear_layers(torch::nn::Module& module) {
  std::vector<NamedLayer> layers;
  const auto add = [&](const std::string& name, torch::nn::Module& part) {
    auto* layer = dynamic_cast<torch::nn::LinearImpl*>(&part);
    if (layer == nullptr) return;
    // A module may be registered under two names.
    const bool is_known =
        std::ranges::any_of(layers, [&](const auto& other) { return other.layer == layer; });
    if (!is_known) layers.push_back({name, layer});
  };
  add("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    add(item.key(), *item.value());
  return layers;
}

void check_targets(const std::vector<NamedLayer>& layers, const LoraOptions& options,
                   const torch::nn::Module& module) {
  for (const auto& target : options.targets) {
    const bool names_one = std::ranges::any_of(
        layers, [&](const auto& layer) { return is_target(target, layer.name); });
    if (names_one) continue;
    std::set<std::string> last_parts;
    for (const auto& layer : layers)
      last_parts.insert(layer.name.substr(layer.name.rfind('.') + 1));
    TORCH_CHECK_VALUE(false, kName, ": expected target '", target, "' to name a linear layer of ",
                      nn::name_of(module), ", which has none of this name; nearest names: ",
                      format_list(nearest_names(target, {last_parts.begin(), last_parts.end()})));
  }
}

std::vector<NamedLayer> find_layers(torch::nn::Module& module, const LoraOptions& options) {
  const auto layers = linear_layers(module);
  check_targets(layers, options, module);
  std::vector<NamedLayer> found;
  for (const auto& layer : layers) {
    const bool is_named =
        options.targets.empty() || std::ranges::any_of(options.targets, [&](const auto& target) {
          return is_target(target, layer.name);
        });
    if (is_named && (!options.filter || options.filter(layer.name, *layer.layer)))
      found.push_back(layer);
  }
  TORCH_CHECK_VALUE(!found.empty(), kName, ": expected a linear layer in ", nn::name_of(module),
                    ", got ", layers.size(), ", and none that the filter takes");
  return found;
}

void check_layer(const NamedLayer& named) {
  nn::require_hook_point(*named.layer, kName);
  nn::check_contract(*named.layer, {kName});
  const auto& weight = named.layer->weight;
  TORCH_CHECK_TYPE(at::isFloatingType(weight.scalar_type()), kName,
                   ": expected floating-point weights, got ", weight.scalar_type(), " in '",
                   named.name, "'");
  TORCH_CHECK_VALUE(!dtensor::has_part(weight) || !dtensor::part_of(weight).owner, kName,
                    ": expected '", named.name,
                    "' not to be sharded yet, but fully_shard has been applied to it; call lora "
                    "first, then fully_shard");
  TORCH_CHECK_VALUE(!detail::replicate::is_managed(weight), kName, ": expected '", named.name,
                    "' not to be replicated yet, but replicate averages its gradients already; "
                    "call lora first, then replicate");
}

at::ScalarType dtype_of_adapter(const at::Tensor& weight, const LoraOptions& options) {
  if (options.dtype) return *options.dtype;
  const auto dtype = weight.scalar_type();
  return dtype == at::kDouble ? dtype : at::kFloat;
}

/// As the layer's weight lies: A has its columns, B its rows.
void place_as_weight(const at::Tensor& weight, const LoraLayer& state) {
  if (!dtensor::has_part(weight)) return;
  const auto distributed = DTensor::of(weight);
  const auto placements_for = [&](int64_t dim) {
    Placements placements;
    for (const auto& placement : distributed.placements())
      placements.push_back(placement.is_shard(dim) ? placement : Replicate());
    return placements;
  };
  if (const auto packed = dtensor::packed_rows(weight); packed.parts > 1)
    dtensor::remember_packed(state.b->weight, packed);
  distribute_tensor_(state.a->weight, distributed.mesh(), placements_for(1));
  distribute_tensor_(state.b->weight, distributed.mesh(), placements_for(0));
}

std::shared_ptr<LoraLayer> make_adapter(const torch::nn::LinearImpl& layer,
                                        const LoraOptions& options) {
  const at::NoGradGuard no_grad;
  const auto& weight = layer.weight;
  const auto device = weight.is_meta() ? c10::Device(c10::kCPU) : weight.device();
  const auto on_host = at::TensorOptions(dtype_of_adapter(weight, options)).device(c10::kCPU);
  // kaiming_uniform with a = sqrt(5): the bound is 1 / sqrt(columns). Drawn on the host, so that a
  // seed means the same on every device.
  const auto bound = 1 / std::sqrt(static_cast<double>(layer.options.in_features()));
  auto a = at::empty({options.rank, layer.options.in_features()}, on_host).uniform_(-bound, bound);
  auto b = at::zeros({layer.options.out_features(), options.rank}, on_host.device(device));
  auto state = std::make_shared<LoraLayer>();
  state->a = std::make_shared<LoraMatrixImpl>(a.to(device));
  state->b = std::make_shared<LoraMatrixImpl>(b);
  state->rank = options.rank;
  state->alpha = options.alpha;
  state->dropout = options.dropout;
  state->rslora = options.rslora;
  return state;
}

bool is_autocast(const at::Tensor& tensor) {
  return at::autocast::is_autocast_enabled(tensor.device().type());
}

/// What the layer gives and what the adapter adds.
at::Tensor adapted(const LoraLayer& state, const torch::nn::Module& layer, const at::Tensor& input,
                   const at::Tensor& output) {
  const auto &a = state.a->weight, &b = state.b->weight;
  const bool is_trained = layer.is_training() && at::GradMode::is_enabled() && a.requires_grad();
  if (state.is_merged) {
    TORCH_CHECK_VALUE(!is_trained, kName, ": expected adapters that are not merged in training, ",
                      "since merged ones get no gradients; call unmerge_lora(net), or net->eval()");
    return output;
  }
  auto x = is_autocast(input) ? input : input.to(a.scalar_type());
  if (state.dropout > 0) x = at::dropout(x, state.dropout, layer.is_training());
  // Scaled where there are few features.
  const auto added = at::linear(at::linear(x, a) * state.scale(), b);
  return output + added.to(output.scalar_type());
}

/// Next to what the layer computes: hooks that place or watch its result see the sum. Done anew
/// when adapters are merged: compiled programs know by its number that the layer does otherwise.
void hook_layer(torch::nn::LinearImpl& layer, LoraLayer& state) {
  state.hook.remove();
  // By reference, since the state holds the handle.
  state.hook = register_forward_hook(
      layer,
      [&state](torch::nn::Module& called, nn::Arguments& arguments, nn::Result& result) {
        auto& output = result.tensor();
        output = adapted(state, called, arguments.tensor(0), output);
      },
      {.prepend = true});
}

void adapt(const NamedLayer& named, const LoraOptions& options) {
  auto& layer = *named.layer;
  auto state = make_adapter(layer, options);
  place_as_weight(layer.weight, *state);
  layer.register_module(kA, state->a);
  layer.register_module(kB, state->b);
  nn::apply_composable(layer, {kName}, [&] {
    hook_layer(layer, *state);
    return state;
  });
}

void freeze_others(torch::nn::Module& module) {
  std::unordered_set<const at::TensorImpl*> adapters;
  for (const auto& tensor : lora_parameters(module)) adapters.insert(tensor.unsafeGetTensorImpl());
  for (auto& parameter : module.parameters()) {
    if (adapters.contains(parameter.unsafeGetTensorImpl())) continue;
    parameter.requires_grad_(false);
    parameter.mutable_grad().reset();
  }
}

/// Merged alone both would change.
void check_not_shared(const char* function, torch::nn::Module& module,
                      const std::vector<AdaptedLayer>& layers) {
  for (const auto& layer : layers) {
    const auto own = (layer.name.empty() ? "" : layer.name + ".") + "weight";
    for (const auto& parameter : module.named_parameters()) {
      TORCH_CHECK_VALUE(
          parameter.key() == own || !parameter.value().is_same(layer.layer->weight), function,
          ": expected weights that no other module has, but '", own, "' is '", parameter.key(),
          "' as well, which would change with it; leave that layer out by LoraOptions::filter");
    }
  }
}

/// Adds `times` what the adapters add; sums of 16 bits are made in float32.
void add_to_weights(const char* function, torch::nn::Module& module, bool merges) {
  const at::NoGradGuard no_grad;
  const auto layers = require_adapted(function, module);
  check_not_shared(function, module, layers);
  for (const auto& [name, layer, state] : layers) {
    TORCH_CHECK_VALUE(state->is_merged != merges, function, ": expected adapters that are ",
                      merges ? "not merged yet" : "merged", ", got ", merges ? "merged" : "others",
                      " in '", name, "'; nothing was changed");
  }
  for (const auto& [name, layer, state] : layers) {
    auto weight = layer->weight.detach();
    const auto dtype = dtype_of_adapter(weight, {});
    const auto sign = merges ? 1.0 : -1.0;
    const auto added = at::matmul(state->b->weight.detach().to(dtype),
                                  state->a->weight.detach().to(dtype) * (sign * state->scale()));
    if (weight.scalar_type() == dtype)
      weight.add_(added);
    else
      weight.copy_((weight.to(dtype) + added).to(weight.scalar_type()));
    state->is_merged = merges;
    hook_layer(*layer, *state);
  }
}

}  // namespace
}  // namespace detail::lora

using namespace detail::lora;

void detail::apply_lora(torch::nn::Module& module, const LoraOptions& options) {
  check_options(options);
  check_engines(module);
  const auto layers = find_layers(module, options);
  for (const auto& named : layers) check_layer(named);
  for (const auto& named : layers) adapt(named, options);
  freeze_others(module);
}

std::vector<at::Tensor> lora_parameters(nn::ModuleRef module) {
  std::vector<at::Tensor> parameters;
  for (const auto& [name, layer, state] : adapted_layers(module)) {
    parameters.push_back(state->a->weight);
    parameters.push_back(state->b->weight);
  }
  return parameters;
}

void merge_lora(nn::ModuleRef module) { add_to_weights("merge_lora", module, /*merges=*/true); }

void unmerge_lora(nn::ModuleRef module) {
  add_to_weights("unmerge_lora", module, /*merges=*/false);
}

void remove_lora(nn::ModuleRef module) {
  const auto layers = require_adapted("remove_lora", module);
  for (const auto& part : module->modules()) {
    for (const char* engine : {"replicate", "fully_shard"}) {
      TORCH_CHECK_VALUE(!nn::find_state(*part, engine), "remove_lora: expected ",
                        nn::name_of(module), " without ", engine,
                        ", whose parameters adapters are among; save_pretrained and save_lora "
                        "write such modules as they are");
    }
  }
  for (const auto& [name, layer, state] : layers) {
    state->hook.remove();
    layer->unregister_module(kA);
    layer->unregister_module(kB);
    auto& applied = nn::find_hook_point(*layer)->hooks().states().applied;
    std::erase_if(applied, [](const auto& one) { return one.function == kName; });
  }
}

}  // namespace tessera
