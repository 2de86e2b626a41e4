#pragma once

#include <tessera/corpus.h>
#include <tessera/parallelize.h>
#include <tessera/pipeline.h>

#include "train/settings.h"

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::train {

/// What is trained: a decoder that predicts the next token.
class LanguageModel {
 public:
  virtual ~LanguageModel() = default;

  /// The parameters, to be spread over ranks, saved and optimised.
  virtual std::shared_ptr<torch::nn::Module> module() const = 0;
  /// What activation checkpointing computes again, and fully_shard gathers, at a time.
  virtual std::vector<std::shared_ptr<torch::nn::Module>> blocks() const = 0;
  virtual ParallelPlan tensor_plan() const = 0;
  /// Of sequences in parts, whose loss is the mean over this rank's targets.
  virtual ParallelPlan context_plan() const = 0;

  /// [batch, tokens] to [batch, tokens, vocabulary].
  virtual at::Tensor logits(const at::Tensor& tokens) = 0;
  /// Mean cross entropy, in float32, of the targets that are not -100. `positions`: of rows that
  /// hold several samples, as nn::packed_mask takes them; undefined: each row is one.
  virtual at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets,
                          const at::Tensor& positions) = 0;

  /// Cuts it into stages over the ranks of a mesh, once it has values. From then on logits() and
  /// loss() without gradients go through all ranks, each of which calls them.
  virtual void cut(PipelineOptions options) = 0;
  /// Null unless it is cut. Its step() is forward and backward.
  virtual Pipeline* pipeline() = 0;

  /// Memory on the device, and the values it starts with.
  virtual void place(c10::Device device) = 0;
  /// The same module by module, for fully_shard; none for one that place() has to be called for.
  virtual std::function<void(torch::nn::Module&)> start_values() const = 0;
  /// Weights of a Hugging Face folder. Every rank calls it.
  virtual void load(const std::string& folder) = 0;
  /// Writes such a folder; see `tessera export`.
  virtual void export_to(const std::string& folder, const std::string& tokenizer) = 0;

  /// What a checkpoint of it depends on besides its sizes; empty: on nothing.
  virtual std::string config() const = 0;
  /// "GPT", "qwen2".
  virtual std::string name() const = 0;
  /// Numbers of the matrices that a token is multiplied by, the head among them.
  virtual double weights_in_products() const = 0;
  /// Features of all heads of a block.
  virtual int64_t attention_width() const = 0;
};
using Model = std::shared_ptr<LanguageModel>;

/// With the sizes, the kind of model and the tokenizer that are left open: those of --preset or of
/// --from, whose config.json it reads. Throws a ValueError that names the flag.
Settings with_sizes(Settings settings);

data::Tokenizer make_tokenizer(const Settings& settings);

/// By settings with sizes. `vocabulary`: the tokenizer's. Throws a ValueError.
Model make_language_model(const Settings& settings, int64_t vocabulary);

/// What it starts from is a published model's, by --preset or --from.
inline bool is_published(const Settings& settings) {
  return !settings.preset.empty() || !settings.from.empty();
}

}  // namespace tessera::train
