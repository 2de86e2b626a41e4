// Adapters alone: as dicts, and as PEFT's folders.
#include <tessera/dtensor.h>
#include <tessera/lora.h>
#include <tessera/parallelize.h>
#include <tessera/serialize/safetensors.h>

#include "base/text.h"
#include "dtensor/part.h"
#include "lora/adapters.h"
#include "state/collective_section.h"
#include "state/export_files.h"
#include "state/files/disk.h"
#include "state/files/json_text.h"
#include "state/holdings.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

namespace tessera {
namespace {

using namespace detail::lora;
using state::Json;
namespace fs = std::filesystem;

constexpr const char* kConfigName = "adapter_config.json";
constexpr const char* kWeightsName = "adapter_model.safetensors";
constexpr const char* kPrefix = "base_model.model.";
constexpr uint64_t kMaxConfig = 10'000'000;

/// With rows in their own order. Collective if it is distributed.
at::Tensor whole_value(const at::Tensor& parameter) {
  const auto value = parameter.detach();
  if (!is_dtensor(value)) return value;
  const auto whole = DTensor::of(value).full_tensor();
  const auto packed = dtensor::packed_rows(parameter);
  return packed.parts > 1 ? unpack_rows(whole, packed.parts, packed.ranks) : whole;
}

/// Each rank cuts its part.
void set_value(const at::Tensor& parameter, const at::Tensor& value) {
  auto to = parameter.detach();
  if (!is_dtensor(to)) {
    to.copy_(value);
    return;
  }
  const auto placed = DTensor::of(to);
  const auto packed = dtensor::packed_rows(parameter);
  const auto plain = value.detach().to(to.options().device(), to.scalar_type());
  to.copy_(
      distribute_tensor(packed.parts > 1 ? pack_rows(plain, packed.parts, packed.ranks) : plain,
                        placed.mesh(), placed.placements(), /*src_data_rank=*/std::nullopt));
}

struct NamedMatrix {
  std::string name;
  at::Tensor parameter;
};

std::vector<NamedMatrix> matrices_of(const std::vector<AdaptedLayer>& layers) {
  std::vector<NamedMatrix> all;
  for (const auto& layer : layers) {
    all.push_back({parameter_name(layer, kA), layer.state->a->weight});
    all.push_back({parameter_name(layer, kB), layer.state->b->weight});
  }
  return all;
}

void require_here(const char* function, const std::vector<AdaptedLayer>& layers) {
  for (const auto& [name, parameter] : matrices_of(layers))
    TORCH_CHECK_VALUE(!state::is_elsewhere(parameter), function,
                      ": expected adapters of which each rank has a part, but '", name,
                      "' is on other ranks, as in a pipeline; save() the net, load() it without a "
                      "pipeline, and write that");
}

/// By the last parts of the names, where these name no other linear layer.
std::vector<std::string> targets_of(torch::nn::Module& module,
                                    const std::vector<AdaptedLayer>& layers) {
  std::set<std::string> last_parts, names, named;
  for (const auto& layer : layers) {
    names.insert(layer.name);
    last_parts.insert(layer.name.substr(layer.name.rfind('.') + 1));
  }
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    const auto& name = item.key();
    const bool is_linear = dynamic_cast<torch::nn::LinearImpl*>(item.value().get()) != nullptr;
    if (is_linear && last_parts.contains(name.substr(name.rfind('.') + 1))) named.insert(name);
  }
  const auto& chosen = named == names ? last_parts : names;
  return {chosen.begin(), chosen.end()};
}

void check_alike(const std::vector<AdaptedLayer>& layers) {
  const auto& first = *layers.front().state;
  for (const auto& layer : layers) {
    const auto& other = *layer.state;
    TORCH_CHECK_NOT_IMPLEMENTED(
        other.rank == first.rank && other.alpha == first.alpha && other.rslora == first.rslora,
        "save_lora: expected adapters of one rank and alpha, which adapter_config.json has, but '",
        layers.front().name, "' has ", first.rank, " and ", first.alpha, ", '", layer.name, "' ",
        other.rank, " and ", other.alpha, "; save lora_state_dict(net) instead");
  }
}

std::string config_text(torch::nn::Module& module, const std::vector<AdaptedLayer>& layers,
                        const SaveLoraOptions& options) {
  const auto& state = *layers.front().state;
  Json config = {{"peft_type", "LORA"},
                 {"r", state.rank},
                 {"lora_alpha", state.alpha},
                 {"lora_dropout", state.dropout},
                 {"use_rslora", state.rslora},
                 {"target_modules", targets_of(module, layers)},
                 {"bias", "none"},
                 {"fan_in_fan_out", options.fan_in_fan_out},
                 {"inference_mode", true},
                 {"init_lora_weights", true},
                 {"modules_to_save", nullptr},
                 {"base_model_name_or_path", nullptr}};
  if (state.alpha == static_cast<double>(static_cast<int64_t>(state.alpha)))
    config["lora_alpha"] = static_cast<int64_t>(state.alpha);
  if (!options.base_model.empty()) config["base_model_name_or_path"] = options.base_model;
  return state::to_text("save_lora", config);
}

Json read_config(const char* function, const std::string& folder) {
  const state::FileName name{function, (fs::path(folder) / kConfigName).string()};
  const state::InputFile file(name);
  name.require(file.bytes() <= kMaxConfig, "expected the config of an adapter, got ", file.bytes(),
               " bytes");
  auto config = state::parse_json(name, file.read(0, file.bytes()));
  name.require(config.is_object(), "expected the config of an adapter, an object");
  return config;
}

/// What would make other results than ours.
void refuse_unknown(const state::FileName& name, const Json& config) {
  const auto is_off = [](const Json& value) {
    return value.is_null() || value == false || value == "none" ||
           ((value.is_object() || value.is_array()) && value.empty());
  };
  for (const char* field : {"use_dora",
                            "bias",
                            "modules_to_save",
                            "rank_pattern",
                            "alpha_pattern",
                            "layer_replication",
                            "lora_bias",
                            "trainable_token_indices",
                            "target_parameters",
                            "use_qalora",
                            "exclude_modules",
                            "layers_to_transform",
                            "alora_invocation_tokens",
                            "arrow_config",
                            "kasa_config",
                            "lora_ga_config",
                            "megatron_config",
                            "monteclora_config",
                            "use_bdlora",
                            "velora_config"}) {
    const auto found = config.find(field);
    name.require(found == config.end() || is_off(*found), "expected no ", field,
                 ", which is not known here, got ",
                 found == config.end() ? "" : state::in_quotes(found->dump()));
  }
  // Others change the weights that they start from (PiSSA, OLoRA, LoftQ, …).
  const auto start = config.find("init_lora_weights");
  name.require(
      start == config.end() || start->is_null() || start->is_boolean() || *start == "gaussian" ||
          *start == "eva" || *start == "orthogonal",
      "expected adapters of the weights as they are, got init_lora_weights ",
      start == config.end() ? "" : state::in_quotes(start->dump()),
      "; convert them with peft (save_pretrained with path_initial_model_for_weight_conversion)");
  const auto kind = config.find("peft_type");
  name.require(kind != config.end() && *kind == "LORA", "expected peft_type LORA, got ",
               kind == config.end() ? "none" : state::in_quotes(kind->dump()));
}

double number_field(const state::FileName& name, const Json& config, const char* field,
                    double otherwise) {
  const auto found = config.find(field);
  if (found == config.end() || found->is_null()) return otherwise;
  name.require(found->is_number(), "expected a number for ", field, ", got ",
               state::in_quotes(found->dump()));
  return found->get<double>();
}

std::vector<std::string> targets_in(const state::FileName& name, const Json& config) {
  const auto found = config.find("target_modules");
  if (found != config.end() && *found == "all-linear") return {};
  const bool is_list = found != config.end() && found->is_array() && !found->empty() &&
                       std::ranges::all_of(*found, [](const auto& one) { return one.is_string(); });
  name.require(is_list, "expected target_modules to be a list of names, or all-linear; give ",
               "LoraOptions by hand for what an expression names");
  return found->get<std::vector<std::string>>();
}

LoraOptions options_in(const char* function, const std::string& folder) {
  const auto config = read_config(function, folder);
  const state::FileName name{function, (fs::path(folder) / kConfigName).string()};
  refuse_unknown(name, config);
  const auto rank = number_field(name, config, "r", 8);
  name.require(rank >= 1 && rank <= 1e9 && rank == std::floor(rank), "expected r from 1, got ",
               rank);
  const auto rslora = config.find("use_rslora");
  return {.rank = static_cast<int64_t>(rank),
          .alpha = number_field(name, config, "lora_alpha", 8),
          .dropout = number_field(name, config, "lora_dropout", 0),
          .rslora = rslora != config.end() && *rslora == true,
          .targets = targets_in(name, config)};
}

std::string difference_of(const StateDict& dict, const std::vector<NamedMatrix>& matrices) {
  std::vector<std::string> missing, unexpected, mismatched;
  std::set<std::string> known;
  for (const auto& [name, parameter] : matrices) {
    known.insert(name);
    const auto* value = dict.find(name);
    if (value == nullptr)
      missing.push_back(name);
    else if (value->sizes() != parameter.sizes())
      mismatched.push_back(
          c10::str(name, " (expected ", parameter.sizes(), ", got ", value->sizes(), ")"));
  }
  for (const auto& [name, value] : dict) {
    if (!known.contains(name)) unexpected.push_back(name);
  }
  std::string text;
  if (!missing.empty()) text += "; missing: " + format_list(missing);
  if (!unexpected.empty()) text += "; unexpected: " + format_list(unexpected);
  if (!mismatched.empty()) text += "; of other shapes: " + format_list(mismatched);
  return text;
}

void load_dict(const std::string& caller, torch::nn::Module& module, const char* function,
               const StateDict& dict) {
  const at::NoGradGuard no_grad;
  const auto layers = require_adapted(function, module);
  for (const auto& layer : layers)
    TORCH_CHECK_VALUE(!layer.state->is_merged, caller, ": expected adapters that are not merged, ",
                      "got merged ones in '", layer.name, "'; call unmerge_lora first");
  const auto matrices = matrices_of(layers);
  const auto difference = difference_of(dict, matrices);
  TORCH_CHECK_VALUE(difference.empty(), caller, ": expected the adapters of ", nn::name_of(module),
                    difference, "; nothing was loaded");
  for (const auto& [name, parameter] : matrices) set_value(parameter, *dict.find(name));
}

}  // namespace

StateDict lora_state_dict(nn::ModuleRef module) {
  StateDict dict;
  const auto layers = require_adapted("lora_state_dict", module);
  require_here("lora_state_dict", layers);
  for (const auto& [name, parameter] : matrices_of(layers))
    dict.insert(name, whole_value(parameter));
  return dict;
}

void load_lora_state_dict(nn::ModuleRef module, const StateDict& dict) {
  load_dict("load_lora_state_dict", module, "load_lora_state_dict", dict);
}

void save_lora(const std::string& folder, nn::ModuleRef module, const SaveLoraOptions& options) {
  constexpr const char* kFunction = "save_lora";
  const state::CollectiveSection ranks(options.group);
  std::string config;
  ranks.run(
      kFunction,
      [&] {
        const auto layers = require_adapted(kFunction, module);
        check_alike(layers);
        require_here(kFunction, layers);
        config = config_text(module, layers, options);
        return std::string();
      },
      folder);
  const auto dict = lora_state_dict(module);
  ranks.run(kFunction, [&] {
    if (ranks.rank() != 0) return std::string();
    StateDict values;
    for (const auto& [name, value] : dict) values.insert(kPrefix + name, value);
    const fs::path place(folder);
    state::ReplacedFile text(kFunction, (place / kConfigName).string());
    text.file().write(config.data(), config.size());
    write_safetensors((place / kWeightsName).string(), values);
    text.publish();
    return std::string();
  });
}

LoraOptions read_lora_options(const std::string& folder) {
  return options_in("read_lora_options", folder);
}

void load_lora(const std::string& folder, nn::ModuleRef module) {
  constexpr const char* kFunction = "load_lora";
  const auto options = options_in(kFunction, folder);
  for (const auto& layer : require_adapted(kFunction, module)) {
    const auto& state = *layer.state;
    TORCH_CHECK_VALUE(
        state.rank == options.rank && state.alpha == options.alpha &&
            state.rslora == options.rslora,
        kFunction, ": ", folder, ": expected adapters as lora() has made them, of rank ",
        state.rank, " and alpha ", state.alpha, ", got ", options.rank, " and ", options.alpha,
        options.rslora ? ", with use_rslora" : "", "; give lora() read_lora_options(folder)");
  }
  StateDict dict;
  for (const auto& [name, value] : read_safetensors((fs::path(folder) / kWeightsName).string()))
    dict.insert(name.starts_with(kPrefix) ? name.substr(std::string(kPrefix).size()) : name, value);
  load_dict(c10::str(kFunction, ": ", folder), module, kFunction, dict);
}

}  // namespace tessera
