#pragma once

#include <tessera/nn.h>

#include <torch/nn/modules/container/modulelist.h>

/// The GPT that is trained. benchmarks/peers/train_gpt.py has the same for PyTorch: names, shapes
/// and, with one seed, values.
namespace tessera::train {

struct ModelShape {
  int64_t vocabulary = 256, blocks = 4, width = 128, heads = 4, context = 128;
  double dropout = 0;
};

/// Pre-norm attention and a layer of four times the width.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const ModelShape& shape);
  /// x: [batch, tokens, width]; mask: as nn::packed_mask makes it, none: causal.
  at::Tensor forward(at::Tensor x, const at::Tensor& mask);

 private:
  at::Tensor attend(const at::Tensor& x, const at::Tensor& mask);

  int64_t head_size_;
  nn::LayerNorm attention_norm_, mlp_norm_;
  nn::Linear
      qkv_;  // features ordered [head, query or key or value, size]: a cut leaves heads whole
  nn::Linear projection_, up_, down_;
  nn::Dropout dropout_;
};
TESSERA_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const ModelShape& shape);
  at::Tensor forward(const at::Tensor& tokens);  // [batch, tokens] -> [batch, tokens, vocabulary]
  /// The same of rows that hold several sequences; positions: as nn::packed_mask takes them.
  at::Tensor packed(const at::Tensor& tokens, const at::Tensor& positions);

  /// As modules that take and give one tensor each, for pipeline(); what they are made of is this
  /// model's.
  nn::Sequential chain() const;

  const torch::nn::ModuleList& blocks() const { return blocks_; }
  const ModelShape& shape() const { return shape_; }

 private:
  at::Tensor run(const at::Tensor& tokens, const at::Tensor& positions, const at::Tensor& mask);

  ModelShape shape_;
  nn::Embedding tokens_, positions_;
  torch::nn::ModuleList blocks_;
  nn::LayerNorm norm_;
  nn::Linear head_;
};
TESSERA_MODULE(Gpt);
TESSERA_MODULE_METHOD(Gpt, packed);

/// Mean cross entropy of the next tokens, in float32.
at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace tessera::train
