#include <tessera/dtensor.h>
#include <tessera/models.h>
#include <tessera/nn/linear_cross_entropy.h>

#include "dtensor/part.h"
#include "lora/adapters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <c10/util/Exception.h>
#include <torch/csrc/api/include/torch/nn/modules/embedding.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>
#include <torch/csrc/api/include/torch/nn/modules/normalization.h>

#include <cmath>
#include <ostream>
#include <unordered_set>

namespace tessera::models {
namespace {

/// Layers whose outputs are added to the residual stream: they start smaller, the more there are.
std::unordered_set<const torch::nn::Module*> residual_layers(const torch::nn::Module& model) {
  std::unordered_set<const torch::nn::Module*> found;
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (const auto* attention = dynamic_cast<const GPT2AttentionImpl*>(module.get()))
      found.insert(attention->c_proj.get());
    if (const auto* mlp = dynamic_cast<const GPT2MLPImpl*>(module.get()))
      found.insert(mlp->c_proj.get());
  }
  return found;
}

std::function<void(torch::nn::Module&)> initializer(const torch::nn::Module& model,
                                                    const DecoderConfig& config) {
  const auto deviation = config.initializer_range;
  const auto of_residual =
      deviation / std::sqrt(2.0 * static_cast<double>(config.num_hidden_layers));
  return [deviation, of_residual, residual = residual_layers(model)](torch::nn::Module& module) {
    const at::NoGradGuard no_grad;
    if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) {
      linear->weight.normal_(0, residual.count(&module) ? of_residual : deviation);
      if (linear->bias.defined()) linear->bias.zero_();
    } else if (auto* embedding = dynamic_cast<torch::nn::EmbeddingImpl*>(&module)) {
      embedding->weight.normal_(0, deviation);
    }
  };
}

void check_tokens(const char* function, const at::Tensor& tokens, const DecoderConfig& config) {
  TORCH_CHECK_VALUE(tokens.dim() == 2, function, ": expected tokens of [batch, length], got ",
                    tokens.sizes());
  TORCH_CHECK_VALUE(tokens.size(1) <= config.max_position_embeddings, function,
                    ": expected rows of at most max_position_embeddings (",
                    config.max_position_embeddings, ") tokens, got ", tokens.size(1),
                    "; cut them, or make the model with more");
}

/// What multiplies outside of the module that has it. A shard is none of a tensor parallel head,
/// though it looks like one.
const at::Tensor& checked_weight(const char* function, const char* name, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(!dtensor::has_part(weight) || !dtensor::part_of(weight).owner, function,
                    ": expected '", name,
                    "' to be whole, got a shard: fully_shard holds it in a unit inside of the "
                    "model, which is whole in its own forward alone; leave head and embedding to "
                    "the outermost unit, fully_shard(net), and call the model itself");
  return weight;
}

}  // namespace

CausalLMImpl::CausalLMImpl(DecoderConfig config) : config_(std::move(config)) {
  check(config_);
  if (config_.family == Family::GPT2)
    transformer_ = register_module("transformer", GPT2(config_));
  else
    model_ = register_module("model", Decoder(config_));
  if (!config_.tie_word_embeddings) {
    lm_head_ = register_module(
        "lm_head",
        nn::Linear(torch::nn::LinearOptions(config_.hidden_size, config_.vocab_size).bias(false)));
  }
  const auto start = initializer(*this, config_);
  for (const auto& module : modules(/*include_self=*/false)) start(*module);
}

at::Tensor CausalLMImpl::run_body(const at::Tensor& tokens, const at::Tensor& positions) {
  return model_.is_empty() ? transformer_(tokens, positions) : model_(tokens, positions);
}

const at::Tensor& CausalLMImpl::head_weight(const char* function) const {
  if (!lm_head_.is_empty()) return checked_weight(function, "lm_head.weight", lm_head_->weight);
  return model_.is_empty()
             ? checked_weight(function, "transformer.wte.weight", transformer_->wte->weight)
             : checked_weight(function, "model.embed_tokens.weight", model_->embed_tokens->weight);
}

at::Tensor CausalLMImpl::forward(const at::Tensor& tokens) {
  check_tokens("CausalLM", tokens, config_);
  if (!lm_head_.is_empty()) return lm_head_(run_body(tokens));
  const auto& weight = head_weight("CausalLM");
  const auto x = run_body(tokens);
  if (!is_dtensor(weight) || is_dtensor(x)) return at::linear(x, weight);
  // Rows of a tied weight lie on several ranks: each makes the logits of its own.
  const auto placed = DTensor::from_local(x, DTensor::of(weight).mesh());
  return DTensor::of(at::linear(placed, weight)).full_tensor();
}

at::Tensor CausalLMImpl::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  return loss_of_rows(tokens, targets, {});
}

at::Tensor CausalLMImpl::packed_loss(const at::Tensor& tokens, const at::Tensor& targets,
                                     const at::Tensor& positions) {
  TORCH_CHECK_VALUE(positions.defined() && positions.sizes() == tokens.sizes(),
                    "CausalLM::packed_loss: expected a position for each token, got positions of ",
                    positions.defined() ? positions.sizes() : at::IntArrayRef(), " for tokens of ",
                    tokens.sizes());
  return loss_of_rows(tokens, targets, positions);
}

at::Tensor CausalLMImpl::loss_of_rows(const at::Tensor& tokens, const at::Tensor& targets,
                                      const at::Tensor& positions) {
  check_tokens("CausalLM::loss", tokens, config_);
  TORCH_CHECK_VALUE(targets.sizes() == tokens.sizes(),
                    "CausalLM::loss: expected a target for each token, got targets of ",
                    targets.sizes(), " for tokens of ", tokens.sizes());
  TORCH_CHECK_VALUE(lm_head_.is_empty() || !nn::find_state(*lm_head_, detail::lora::kName),
                    "CausalLM::loss: expected a head without adapter, which would not be computed; "
                    "leave lm_head out of lora()'s targets, or call the model and take the loss of "
                    "its logits");
  const auto& weight = head_weight("CausalLM::loss");
  return nn::linear_cross_entropy(run_body(tokens, positions), weight, targets);
}

std::vector<std::shared_ptr<torch::nn::Module>> CausalLMImpl::blocks() const {
  return model_.is_empty() ? transformer_->h->children() : model_->layers->children();
}

void CausalLMImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::models::CausalLM(" << name_of(config_.family)
         << ", vocab_size=" << config_.vocab_size << ", hidden_size=" << config_.hidden_size
         << ", num_hidden_layers=" << config_.num_hidden_layers << ")";
}

std::function<void(torch::nn::Module&)> param_init_fn(const CausalLM& model) {
  return initializer(*model, model->config());
}

}  // namespace tessera::models
