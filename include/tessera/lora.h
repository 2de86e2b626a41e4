#pragma once

#include <tessera/comm.h>
#include <tessera/nn/module_ref.h>
#include <tessera/state_dict.h>

#include <torch/csrc/api/include/torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// Low-rank adapters of linear layers: training them trains a model at a small part of its memory.
///   tessera::lora(net, {.rank = 16, .alpha = 32, .targets = {"q_proj", "v_proj"}});
namespace tessera {

struct LoraOptions {
  int64_t rank = 8;
  double alpha = 8;     // what an adapter gives is multiplied by alpha / rank
  double dropout = 0;   // of what goes into an adapter, in training
  bool rslora = false;  // by alpha / sqrt(rank) instead
  /// Which layers: patterns (*, ?, [a-c]) of dotted names, or of what stands behind a dot in them:
  /// "q_proj", "layers.3.*.v_proj". Each has to name a layer. None: all linear layers.
  std::vector<std::string> targets = {};
  /// Of these, which; none: all.
  std::function<bool(const std::string& name, const torch::nn::LinearImpl& layer)> filter = {};
  /// Of adapters; none: the layer's, but float32 where that has 16 bits.
  std::optional<at::ScalarType> dtype = std::nullopt;
};

/// What a folder of adapters says beside them, for who reads it.
struct SaveLoraOptions {
  Group group = {};             // who calls it; empty: the default group, or this process alone
  std::string base_model = {};  // name or folder of what they adapt
  bool fan_in_fan_out = false;  // files of that model have weights transposed, as GPT-2's
};

namespace detail {
void apply_lora(torch::nn::Module& module, const LoraOptions& options);
}

/// Gives linear layers of tessera::nn, and modules derived from them by TESSERA_MODULE, in `module`
/// an adapter: y + scale * B(A(x)), with A, [rank, in], drawn as a Linear's weight is, and B, [out,
/// rank], zero. Their names are those of PEFT, "….q_proj.lora_A.weight"; those of all other
/// parameters stay. These are frozen: requires_grad becomes false and their gradients are freed.
/// What is to be trained as well gets requires_grad_(true) afterwards. Returns what it was given.
/// After parallelize_module, whose placements adapters take over (then it is collective), before or
/// after fp8, checkpoint and compile; before replicate, fully_shard and the optimizer. Ranks have
/// to have drawn the same, as for other parameters. Once per layer.
template <nn::ModuleLike M>
M lora(M&& module, const LoraOptions& options = {}) {
  detail::apply_lora(nn::as_module(module), options);
  return std::forward<M>(module);
}

/// A and B of all adapters, for optimizers.
std::vector<at::Tensor> lora_parameters(nn::ModuleRef module);

/// Adds adapters to the weights of their layers, in these' dtype: calls cost what they cost without
/// adapters, and can't train them. save and load refuse them then: remove_lora before,
/// or unmerge_lora. Outside of forward and backward of sharded units, which stay sharded. Every
/// rank calls both. A ValueError if a weight is shared with another module.
void merge_lora(nn::ModuleRef module);
/// Subtracts them again: weights are as before up to rounding.
void unmerge_lora(nn::ModuleRef module);
/// The module as it was before lora(), with frozen parameters and, if merged, with the weights that
/// came of it. Not under replicate or fully_shard.
void remove_lora(nn::ModuleRef module);

/// A and B alone, by their names in `module`, whole on every rank. Every rank of the module's
/// meshes calls it.
StateDict lora_state_dict(nn::ModuleRef module);
/// Gives adapters the values of such a dict. Names and shapes have to be the module's; otherwise
/// one error lists what differs, and nothing is changed.
void load_lora_state_dict(nn::ModuleRef module, const StateDict& dict);

/// Writes adapters as PEFT does, adapter_config.json and adapter_model.safetensors, into `folder`,
/// which is made. Rank 0 of the group writes. Every rank of it, and of the module's meshes, calls
/// it.
void save_lora(const std::string& folder, nn::ModuleRef module,
               const SaveLoraOptions& options = {});
/// What lora() has to be given for the adapters of such a folder. Throws a ValueError that names
/// what is asked for there and not known here.
LoraOptions read_lora_options(const std::string& folder);
/// Loads the adapters of such a folder into a module that lora() has given the same. Every rank
/// reads them.
void load_lora(const std::string& folder, nn::ModuleRef module);

}  // namespace tessera
