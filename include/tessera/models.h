#pragma once

#include <tessera/comm.h>
#include <tessera/models/config.h>
#include <tessera/models/layers.h>
#include <tessera/nn/methods.h>
#include <tessera/parallel/context.h>
#include <tessera/parallel/plan.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Decoders with published weights: plain modules, and Hugging Face's folders. A library of its
/// own: link tessera::models.
namespace tessera::models {

/// A decoder that predicts the next token. Parameters have the names that `transformers` gives
/// them; its values start as there, drawn from the default generator.
class CausalLMImpl : public torch::nn::Module {
 public:
  explicit CausalLMImpl(DecoderConfig config);

  /// Logits: [batch, length] to [batch, length, vocab_size].
  at::Tensor forward(const at::Tensor& tokens);
  /// Mean cross entropy of `targets`, [batch, length]: the tokens that come next, -100 where there
  /// is none to be learned. Logits are never in memory at once: nn::linear_cross_entropy. Hooks of
  /// the head do not run: a ValueError if fully_shard has it, or a tied embedding, in a unit inside
  /// of the model.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);
  /// The same of rows that hold several sequences, none of which sees another: `positions`, [batch,
  /// length], are those of each token in its sequence, as nn::packed_mask has them.
  at::Tensor packed_loss(const at::Tensor& tokens, const at::Tensor& targets,
                         const at::Tensor& positions);

  const DecoderConfig& config() const { return config_; }
  /// The layers, in order: units of fully_shard, and what checkpoint() recomputes.
  std::vector<std::shared_ptr<torch::nn::Module>> blocks() const;

  void pretty_print(std::ostream& stream) const override;

 private:
  /// What the head is given.
  at::Tensor run_body(const at::Tensor& tokens, const at::Tensor& positions = {});
  at::Tensor loss_of_rows(const at::Tensor& tokens, const at::Tensor& targets,
                          const at::Tensor& positions);
  /// Refuses one that is not in memory whole, or as a tensor parallel head.
  const at::Tensor& head_weight(const char* function) const;

  DecoderConfig config_;
  Decoder model_{nullptr};       // llama, qwen2, qwen3
  GPT2 transformer_{nullptr};    // gpt2
  nn::Linear lm_head_{nullptr};  // none if tied
};
TESSERA_MODULE(CausalLM, "tokens");
TESSERA_MODULE_METHOD(CausalLM, loss, packed_loss);

/// Heads, features of the feed-forward part and rows of the vocabulary over the ranks of a mesh:
///   parallelize_module(net, mesh["tp"], tensor_plan(net));
/// Ranks have to divide num_key_value_heads. Logits and loss are whole on every rank.
ParallelPlan tensor_plan(const CausalLM& model);

/// Sequences in parts, over the ranks of a mesh: attention of all layers, and positions.
///   parallelize_module(net, mesh["cp"], context_plan(net));
/// The model is given tokens and targets cut by context_parallel_shard; its loss is the mean over
/// this rank's targets.
ParallelPlan context_plan(const CausalLM& model, const ContextParallelOptions& options = {});

/// What gives a module of `model` the values it starts with, for models that were built under
/// MetaInit: fully_shard(block, {.param_init_fn = param_init_fn(net)}).
std::function<void(torch::nn::Module&)> param_init_fn(const CausalLM& model);

struct FromPretrainedOptions {
  std::optional<at::ScalarType> dtype = std::nullopt;  // none: fp32, whatever the files have
  c10::Device device = c10::Device(c10::kCPU);
};

/// Gives a model that was built under MetaInit memory on the device, and each of its modules the
/// values it starts with: by `start`, or, if there is none, by param_init_fn, which draws them from
/// the device's default generator. fully_shard does it by itself, unit by unit.
void materialize(CausalLM& model, const FromPretrainedOptions& options = {},
                 const std::function<void(torch::nn::Module&)>& start = {});

/// A model with the weights of a Hugging Face folder: config.json and model.safetensors, or several
/// files and model.safetensors.index.json. In eval(), as in Python: net->train() to train it. Not
/// collective.
CausalLM from_pretrained(const std::string& folder, const FromPretrainedOptions& options = {});

/// The weights alone, into a model that is plain, tensor parallel, fully sharded or several of
/// these, and not on the meta device. Each rank reads the blocks of the files that have what it
/// holds, and keeps its values, in the files' dtypes, beside the model until all ranks have read
/// all; then they are converted and given to the model. Every rank of the group calls it (empty:
/// the default group, or this process alone if there is none). One error lists all names and shapes
/// that differ; nothing is changed then.
void load_pretrained(const std::string& folder, CausalLM& model, Group group = {});

struct SavePretrainedOptions {
  Group group = {};                         // as for load_pretrained
  int64_t max_shard_bytes = 5'000'000'000;  // of the values in a file; the same on all ranks
  std::optional<std::string> tokenizer_from =
      std::nullopt;  // a folder whose files of a tokenizer, and generation_config.json, are copied
};

/// Writes config.json and the weights, whole and by the names of `transformers`, which loads the
/// folder. Files take their places when all are complete; others in the folder stay. Rank 0 writes
/// what all gather, one tensor after the other: every rank of the group, and of the model's meshes,
/// calls it.
void save_pretrained(const CausalLM& model, const std::string& folder,
                     const SavePretrainedOptions& options = {});

}  // namespace tessera::models
