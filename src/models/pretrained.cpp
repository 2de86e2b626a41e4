#include <tessera/models.h>
#include <tessera/nn/meta_init.h>

#include "base/text.h"
#include "lora/adapters.h"
#include "models/pretrained_tensors.h"
#include "state/collective_section.h"
#include "state/export_files.h"
#include "state/files/tensor_files.h"
#include "state/read_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/api/include/torch/nn/modules/normalization.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <vector>

namespace tessera::models {
namespace {

constexpr const char* kTokenizerFiles[] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
    "merges.txt",     "added_tokens.json",     "chat_template.jinja",     "tokenizer.model"};
constexpr const char* kGenerationFile = "generation_config.json";
constexpr std::uintmax_t kMaxTokenizerFile = 1'000'000'000;

/// Of a model that was built without.
void give_memory(CausalLM& model, const FromPretrainedOptions& options) {
  const at::NoGradGuard no_grad;
  const auto make = [&](const at::Tensor& tensor, at::ScalarType dtype) {
    const auto made = at::empty_like(tensor, tensor.options().device(options.device).dtype(dtype));
    tensor.unsafeGetTensorImpl()->shallow_copy_from(made.getIntrusivePtr());
  };
  for (const auto& parameter : model->parameters())
    make(parameter, options.dtype.value_or(at::kFloat));
  for (const auto& buffer : model->buffers()) make(buffer, buffer.scalar_type());
  for (const auto& module : model->modules()) {
    if (auto* rotary = dynamic_cast<nn::RotaryEmbeddingImpl*>(module.get()))
      rotary->reset_parameters();
  }
}

/// What starts with ones and zeros whatever the config says.
void reset_norm(torch::nn::Module& module) {
  if (auto* norm = dynamic_cast<nn::RMSNormImpl*>(&module)) norm->reset_parameters();
  if (auto* norm = dynamic_cast<torch::nn::LayerNormImpl*>(&module)) norm->reset_parameters();
}

/// But for adapters, which files of a model do not have.
state::Differences differences_of_model(const state::ModuleValues& values, const CausalLM& model) {
  auto differences = values.differences();
  auto holder = model;  // of the same module
  const auto adapters = detail::lora::adapter_names(*holder);
  std::erase_if(differences.report.missing,
                [&](const std::string& name) { return std::ranges::count(adapters, name) > 0; });
  return differences;
}

/// What the files have for `model`, all that differs being an error. Nothing is read.
std::unique_ptr<state::ModuleValues> compare(const std::string& function, const std::string& folder,
                                             const CausalLM& model,
                                             const PretrainedTensors& source) {
  auto values = std::make_unique<state::ModuleValues>(function, *model, source, /*converts=*/true);
  const auto differences = differences_of_model(*values, model);
  TORCH_CHECK_VALUE(differences.empty(), function, ": ", folder,
                    ": expected the names and shapes of a ", name_of(model->config().family),
                    " model of this config", differences.to_string(),
                    "; nothing was loaded; is config.json that of these weights?");
  return values;
}

PretrainedTensors open_folder(const std::string& function, const std::string& folder,
                              const CausalLM& model) {
  return {state::open_tensors(function, folder), model->config()};
}

void check_memory(const std::string& function, const CausalLM& model) {
  std::vector<std::string> without;
  for (const auto& parameter : model->named_parameters()) {
    if (parameter.value().is_meta()) without.push_back(parameter.key());
  }
  TORCH_CHECK_VALUE(without.empty(), function,
                    ": expected a model whose parameters have memory, got ", format_list(without),
                    " on the meta device; build it without MetaInit, let fully_shard give it "
                    "memory first, or make it by from_pretrained");
}

std::string read_file(const std::filesystem::path& path) {
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(!error && bytes <= kMaxTokenizerFile && file,
                    "save_pretrained: ", path.string(),
                    ": expected a file that can be read, of at most 1 GB");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::map<std::string, std::string> texts_of(const CausalLM& model,
                                            const SavePretrainedOptions& options) {
  std::map<std::string, std::string> texts;
  if (options.tokenizer_from) {
    std::error_code ignored;
    for (const auto* name : kTokenizerFiles) {
      const auto path = std::filesystem::path(*options.tokenizer_from) / name;
      if (std::filesystem::is_regular_file(path, ignored)) texts[name] = read_file(path);
    }
    TORCH_CHECK_VALUE(!texts.empty(), "save_pretrained: expected a tokenizer's files in ",
                      *options.tokenizer_from, ", as tokenizer.json, got none");
    const auto path = std::filesystem::path(*options.tokenizer_from) / kGenerationFile;
    if (std::filesystem::is_regular_file(path, ignored)) texts[kGenerationFile] = read_file(path);
  }
  const auto dtype = model->parameters().front().scalar_type();
  texts["config.json"] = config_text(model->config(), dtype);
  return texts;
}

/// Adapters are no part of the files: their layers' weights hold them, or they would be lost.
std::set<std::string> left_out(torch::nn::Module& model) {
  for (const auto& layer : detail::lora::adapted_layers(model))
    TORCH_CHECK_VALUE(layer.state->is_merged,
                      "save_pretrained: expected a model whose adapters are merged, got '",
                      layer.name, "', whose is not; call merge_lora(net) first, or save_lora");
  const auto names = detail::lora::adapter_names(model);
  return {names.begin(), names.end()};
}

}  // namespace

void materialize(CausalLM& model, const FromPretrainedOptions& options,
                 const std::function<void(torch::nn::Module&)>& start) {
  for (const auto& parameter : model->named_parameters()) {
    TORCH_CHECK_VALUE(
        parameter.value().is_meta(),
        "materialize: expected a model that was built under MetaInit, got one whose '",
        parameter.key(), "' has memory, on ", parameter.value().device());
  }
  give_memory(model, options);
  const auto give_values = start ? start : param_init_fn(model);
  for (const auto& module : model->modules(/*include_self=*/false)) {
    reset_norm(*module);
    give_values(*module);
  }
}

CausalLM from_pretrained(const std::string& folder, const FromPretrainedOptions& options) {
  constexpr const char* kFunction = "from_pretrained";
  auto model = [&] {
    const MetaInit no_memory;
    return CausalLM(read_config(folder));
  }();
  auto source = open_folder(kFunction, folder, model);
  compare(kFunction, folder, model, source);  // before there is memory for whatever a config says
  give_memory(model, options);
  const auto values = compare(kFunction, folder, model, source);
  values->read(source);
  values->apply();
  model->eval();
  return model;
}

void load_pretrained(const std::string& folder, CausalLM& model, Group group) {
  constexpr const char* kFunction = "load_pretrained";
  const state::CollectiveSection ranks(std::move(group));
  std::unique_ptr<state::ModuleValues> values;
  ranks.run(
      kFunction,
      [&] {
        check_memory(kFunction, model);
        auto source = open_folder(kFunction, folder, model);
        values = compare(kFunction, folder, model, source);
        values->read(source);
        return std::string();
      },
      folder);
  ranks.run(kFunction, [&] {
    values->apply();
    return std::string();
  });
}

void save_pretrained(const CausalLM& model, const std::string& folder,
                     const SavePretrainedOptions& options) {
  constexpr const char* kFunction = "save_pretrained";
  const state::CollectiveSection ranks(options.group);
  std::map<std::string, std::string> texts;
  auto holder = model;  // of the same module
  std::set<std::string> adapters;
  const auto sizes = ranks.run(
      kFunction,
      [&] {
        TORCH_CHECK_VALUE(options.max_shard_bytes > 0,
                          "save_pretrained: expected max_shard_bytes above 0, got ",
                          options.max_shard_bytes);
        adapters = left_out(*holder);
        if (ranks.rank() == 0) texts = texts_of(model, options);
        return std::to_string(options.max_shard_bytes);
      },
      folder);
  // It decides in which order tensors are gathered.
  for (size_t rank = 1; rank < sizes.size(); ++rank) {
    TORCH_CHECK_VALUE(sizes[rank] == sizes[0],
                      "save_pretrained: expected the same max_shard_bytes on all ranks, got ",
                      sizes[0], " on rank 0 and ", sizes[rank], " on rank ", rank);
  }
  const auto family = model->config().family;
  state::export_folder(
      kFunction, folder, *holder, options.group,
      {.is_transposed =
           [family](const std::string& name) { return is_transposed_in_files(family, name); },
       .max_file_bytes = static_cast<uint64_t>(options.max_shard_bytes),
       .metadata = {{"format", "pt"}},
       .texts = std::move(texts),
       .is_left_out = [&](const std::string& name) { return adapters.contains(name); }});
}

}  // namespace tessera::models
