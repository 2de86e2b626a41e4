#include "train/model.h"

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/init.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>

namespace tessera::train {
namespace {

namespace F = torch::nn::functional;

nn::LayerNorm norm_of(int64_t width) { return nn::LayerNorm(torch::nn::LayerNormOptions({width})); }

/// As GPT-2 starts: what is added to the residual stream is smaller the more blocks add to it.
void start_values(torch::nn::Module& model, int64_t blocks) {
  const torch::NoGradGuard no_grad;
  const double of_residual = 0.02 / std::sqrt(2.0 * static_cast<double>(blocks));
  for (auto& parameter : model.named_parameters()) {
    const auto& name = parameter.key();
    const bool is_residual = name.ends_with("projection.weight") || name.ends_with("down.weight");
    if (name.ends_with("bias")) {
      torch::nn::init::zeros_(parameter.value());
    } else if (parameter.value().dim() > 1) {
      torch::nn::init::normal_(parameter.value(), 0, is_residual ? of_residual : 0.02);
    }
  }
}

}  // namespace

BlockImpl::BlockImpl(const ModelShape& shape)
    : head_size_(shape.width / shape.heads),
      attention_norm_(register_module("attention_norm", norm_of(shape.width))),
      mlp_norm_(register_module("mlp_norm", norm_of(shape.width))),
      qkv_(register_module("qkv", nn::Linear(shape.width, 3 * shape.width))),
      projection_(register_module("projection", nn::Linear(shape.width, shape.width))),
      up_(register_module("up", nn::Linear(shape.width, 4 * shape.width))),
      down_(register_module("down", nn::Linear(4 * shape.width, shape.width))),
      dropout_(register_module("dropout", nn::Dropout(shape.dropout))) {}

at::Tensor BlockImpl::attend(const at::Tensor& x, const at::Tensor& mask) {
  // Under tensor parallelism this rank has some of the heads.
  // unbind, since three selects would have their gradients padded to the whole and added up.
  auto parts = qkv_(x).unflatten(-1, {-1, 3, head_size_}).unbind(3);
  for (auto& part : parts) part = part.transpose(1, 2);  // [batch, heads, tokens, head_size]
  const auto mixed = at::scaled_dot_product_attention(
      parts[0], parts[1], parts[2], mask.defined() ? std::optional(mask) : std::nullopt,
      /*dropout_p=*/0, /*is_causal=*/!mask.defined());
  return projection_(mixed.transpose(1, 2).flatten(2));
}

at::Tensor BlockImpl::forward(at::Tensor x, const at::Tensor& mask) {
  x = x + dropout_(attend(attention_norm_(x), mask));
  return x + dropout_(down_(F::gelu(up_(mlp_norm_(x)))));
}

namespace {

class ChainFrontImpl : public torch::nn::Module {
 public:
  ChainFrontImpl(const nn::Embedding& tokens, const nn::Embedding& positions)
      : tokens_(register_module("tokens", tokens)),
        positions_(register_module("positions", positions)) {}
  at::Tensor forward(const at::Tensor& tokens) {
    return tokens_(tokens) + positions_(at::arange(tokens.size(1), tokens.options()));
  }

 private:
  nn::Embedding tokens_, positions_;
};

class ChainBlockImpl : public torch::nn::Module {
 public:
  explicit ChainBlockImpl(std::shared_ptr<torch::nn::Module> block)
      : block_(register_module("block", std::move(block))) {}
  at::Tensor forward(const at::Tensor& x) { return block_->as<Block>()->forward(x, at::Tensor()); }

 private:
  std::shared_ptr<torch::nn::Module> block_;
};

class ChainHeadImpl : public torch::nn::Module {
 public:
  ChainHeadImpl(const nn::LayerNorm& norm, const nn::Linear& head)
      : norm_(register_module("norm", norm)), head_(register_module("head", head)) {}
  at::Tensor forward(const at::Tensor& x) { return head_(norm_(x)); }

 private:
  nn::LayerNorm norm_;
  nn::Linear head_;
};

}  // namespace

nn::Sequential GptImpl::chain() const {
  nn::Sequential chain;
  chain->push_back("front", std::make_shared<ChainFrontImpl>(tokens_, positions_));
  for (size_t i = 0; i < blocks_->size(); ++i)
    chain->push_back("block" + std::to_string(i),
                     std::make_shared<ChainBlockImpl>(blocks_->ptr(i)));
  chain->push_back("head", std::make_shared<ChainHeadImpl>(norm_, head_));
  return chain;
}

GptImpl::GptImpl(const ModelShape& shape)
    : shape_(shape),
      tokens_(register_module("tokens", nn::Embedding(shape.vocabulary, shape.width))),
      positions_(register_module("positions", nn::Embedding(shape.context, shape.width))),
      blocks_(register_module("blocks", torch::nn::ModuleList())),
      norm_(nullptr),
      head_(nullptr) {
  for (int64_t i = 0; i < shape.blocks; ++i) blocks_->push_back(Block(shape));
  norm_ = register_module("norm", norm_of(shape.width));
  head_ = register_module(
      "head", nn::Linear(torch::nn::LinearOptions(shape.width, shape.vocabulary).bias(false)));
  start_values(*this, shape.blocks);
}

at::Tensor GptImpl::run(const at::Tensor& tokens, const at::Tensor& positions,
                        const at::Tensor& mask) {
  auto x = tokens_(tokens) + positions_(positions);
  for (const auto& block : *blocks_) x = block->as<Block>()->forward(x, mask);
  return head_(norm_(x));
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  return run(tokens, at::arange(tokens.size(1), tokens.options()), /*mask=*/{});
}

at::Tensor GptImpl::packed(const at::Tensor& tokens, const at::Tensor& positions) {
  return run(tokens, positions, nn::packed_mask(positions));
}

at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return F::cross_entropy(logits.flatten(0, 1).to(at::kFloat), targets.flatten());
}

}  // namespace tessera::train
