#include "jobs.h"

#include <tessera/fully_shard.h>
#include <tessera/nn.h>

#include <torch/torch.h>

#include <optional>

namespace tessera::benchmarks {
namespace {

namespace F = torch::nn::functional;
namespace tnn = tessera::nn;

constexpr uint64_t kWeightSeed = 1;
constexpr uint64_t kBatchSeed = 1000;  // plus the rank

struct Batch {
  at::Tensor input;
  at::Tensor target;
};

class MlpImpl : public torch::nn::Module {
 public:
  MlpImpl()
      : first_(register_module("first", tnn::Linear(50, 32))),
        second_(register_module("second", tnn::Linear(32, 8))) {}

  at::Tensor forward(const at::Tensor& x) {
    return torch::sigmoid(second_(torch::sigmoid(first_(x))));
  }

 private:
  tnn::Linear first_;
  tnn::Linear second_;
};
TESSERA_MODULE(Mlp);

class Net2000Impl : public torch::nn::Module {
 public:
  Net2000Impl() {
    register_module("layers", layers_);
    for (int i = 0; i < 4; ++i) layers_->push_back(tnn::Linear(2000, 2000));
  }

  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers_->size(); ++i)
      x = layers_[i]->as<tnn::Linear>()->forward(i == 0 ? x : F::gelu(x));
    return x;
  }

 private:
  torch::nn::ModuleList layers_;
};
TESSERA_MODULE(Net2000);

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(int64_t width, int64_t heads)
      : heads_(heads),
        attention_norm_(register_module("attention_norm",
                                        tnn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        qkv_(register_module("qkv", tnn::Linear(width, 3 * width))),
        projection_(register_module("projection", tnn::Linear(width, width))),
        mlp_norm_(
            register_module("mlp_norm", tnn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up_(register_module("up", tnn::Linear(width, 4 * width))),
        down_(register_module("down", tnn::Linear(4 * width, width))) {}

  at::Tensor forward(at::Tensor x) {  // [batch, context, width]
    const auto batch = x.size(0);
    const auto context = x.size(1);
    const auto width = x.size(2);
    auto parts = qkv_(attention_norm_(x)).chunk(3, /*dim=*/-1);
    for (auto& part : parts) part = part.view({batch, context, heads_, -1}).transpose(1, 2);
    const auto attended = at::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true);
    x = x + projection_(attended.transpose(1, 2).reshape({batch, context, width}));
    return x + down_(F::gelu(up_(mlp_norm_(x))));
  }

 private:
  int64_t heads_;
  tnn::LayerNorm attention_norm_;
  tnn::Linear qkv_;
  tnn::Linear projection_;
  tnn::LayerNorm mlp_norm_;
  tnn::Linear up_;
  tnn::Linear down_;
};
TESSERA_MODULE(Block);

/// Of a gpt or a qwen.
struct Shape {
  int64_t blocks = 6, width = 256, heads = 4, context = 128, batch = 4, vocabulary = 256;
  bool is_tied = false;  // of a gpt: the head multiplies by the embedding's weight, as GPT-2's does
  int64_t kv_heads = 0, hidden = 0;  // of a qwen: heads of keys and values, features inside SwiGLU
};

class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const Shape& shape)
      : tokens_(register_module("tokens", tnn::Embedding(shape.vocabulary, shape.width))),
        positions_(register_module("positions", tnn::Embedding(shape.context, shape.width))) {
    register_module("blocks", blocks_);
    for (int64_t i = 0; i < shape.blocks; ++i) blocks_->push_back(Block(shape.width, shape.heads));
    norm_ = register_module("norm", tnn::LayerNorm(torch::nn::LayerNormOptions({shape.width})));
    if (shape.is_tied) {
      torch::nn::init::normal_(tokens_->weight, 0, 0.02);  // logits of a size that trains
    } else {
      head_ = register_module(
          "head", tnn::Linear(torch::nn::LinearOptions(shape.width, shape.vocabulary).bias(false)));
    }
  }

  at::Tensor forward(const at::Tensor& ids) {  // [batch, context] -> [batch, context, vocabulary]
    auto x = tokens_(ids) + positions_(torch::arange(ids.size(1), ids.options()));
    for (const auto& block : *blocks_) x = block->as<Block>()->forward(x);
    x = norm_(x);
    return head_ ? head_(x) : at::linear(x, tokens_->weight);
  }

 private:
  tnn::Embedding tokens_;
  tnn::Embedding positions_;
  torch::nn::ModuleList blocks_;
  tnn::LayerNorm norm_{nullptr};
  tnn::Linear head_{nullptr};  // none if tied
};
TESSERA_MODULE(Gpt);

/// A layer of Qwen2.
class QwenBlockImpl : public torch::nn::Module {
 public:
  explicit QwenBlockImpl(const Shape& shape)
      : input_layernorm_(register_module("input_layernorm", norm_of(shape))),
        self_attn_(register_module(
            "self_attn", tnn::GroupedQueryAttention(
                             tnn::GroupedQueryAttentionOptions{.d_model = shape.width,
                                                               .heads = shape.heads,
                                                               .kv_heads = shape.kv_heads,
                                                               .qkv_bias = true,
                                                               .rotary_base = std::nullopt}))),
        post_attention_layernorm_(register_module("post_attention_layernorm", norm_of(shape))),
        mlp_(register_module("mlp", tnn::SwiGLU(shape.width, shape.hidden))) {}

  static tnn::RMSNorm norm_of(const Shape& shape) {
    return tnn::RMSNorm(tnn::RMSNormOptions{.normalized_shape = {shape.width}, .eps = 1e-6});
  }

  at::Tensor forward(at::Tensor x, const at::Tensor& cos, const at::Tensor& sin) {
    x = x + self_attn_(input_layernorm_(x), cos, sin);
    return x + mlp_(post_attention_layernorm_(x));
  }

 private:
  tnn::RMSNorm input_layernorm_;
  tnn::GroupedQueryAttention self_attn_;
  tnn::RMSNorm post_attention_layernorm_;
  tnn::SwiGLU mlp_;
};
TESSERA_MODULE(QwenBlock);

class QwenImpl : public torch::nn::Module {
 public:
  explicit QwenImpl(const Shape& shape)
      : tokens_(register_module("tokens", tnn::Embedding(shape.vocabulary, shape.width))),
        rotary_(register_module("rotary", tnn::RotaryEmbedding(tnn::RotaryEmbeddingOptions{
                                              .head_dim = shape.width / shape.heads,
                                              .base = 1e6,
                                              .max_position = shape.context}))) {
    register_module("blocks", blocks_);
    for (int64_t i = 0; i < shape.blocks; ++i) blocks_->push_back(QwenBlock(shape));
    norm_ = register_module("norm", QwenBlockImpl::norm_of(shape));
    torch::nn::init::normal_(tokens_->weight, 0, 0.02);
  }

  /// The loss itself: logits of this vocabulary are never in memory at once.
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& targets) {  // [batch, context] each
    auto x = tokens_(ids);
    const auto [cos, sin] = rotary_(x);
    for (const auto& block : *blocks_) x = block->as<QwenBlock>()->forward(x, cos, sin);
    return tnn::linear_cross_entropy(norm_(x), tokens_->weight, targets);
  }

 private:
  tnn::Embedding tokens_;
  tnn::RotaryEmbedding rotary_;
  torch::nn::ModuleList blocks_;
  tnn::RMSNorm norm_{nullptr};
};
TESSERA_MODULE(Qwen);

at::Tensor squared_error(const at::Tensor& output, const at::Tensor& target) {
  return F::mse_loss(output, target);
}

at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return F::cross_entropy(logits.view({-1, logits.size(-1)}), targets.view({-1}));
}

using Loss = at::Tensor (*)(const at::Tensor& output, const at::Tensor& target);

template <class Model, class... A>
Model model_of(const A&... options) {
  torch::manual_seed(kWeightSeed);
  return Model(options...);
}

void seed_batch(int rank) { torch::manual_seed(kBatchSeed + static_cast<uint64_t>(rank)); }

/// Weights and batches are drawn on the CPU, so that every device trains on the same.
template <class Model>
void move(Model& model, Batch& batch, c10::Device device) {
  if (device.is_cpu()) return;
  model->to(device);
  batch = {batch.input.to(device), batch.target.to(device)};
}

template <class Model>
Job job_of(Model model, Batch batch, Loss loss, c10::Device device) {
  move(model, batch, device);
  return {.model = model.ptr(),
          .forward = [model, batch]() mutable { return model(batch.input); },
          .loss = [batch, loss](const at::Tensor& output) { return loss(output, batch.target); },
          .device = device};
}

Job make_mlp(int rank, c10::Device device, const Shape& /*unused*/) {
  auto model = model_of<Mlp>();
  seed_batch(rank);
  const auto input = torch::rand({32, 50});
  return job_of(std::move(model), {input, torch::rand({32, 8})}, squared_error, device);
}

Job make_net2000(int rank, c10::Device device, const Shape& /*unused*/) {
  auto model = model_of<Net2000>();
  seed_batch(rank);
  const auto input = torch::randn({16, 2000});
  return job_of(std::move(model), {input, torch::randn({16, 2000})}, squared_error, device);
}

/// Reseeds: the batch is this rank's.
Batch token_batch(int rank, const Shape& shape) {
  seed_batch(rank);
  const auto ids = torch::randint(shape.vocabulary, {shape.batch, shape.context + 1}, torch::kLong);
  return {ids.narrow(1, 0, shape.context).contiguous(),
          ids.narrow(1, 1, shape.context).contiguous()};
}

Job gpt_job(Gpt model, int rank, c10::Device device, const Shape& shape) {
  auto job = job_of(std::move(model), token_batch(rank, shape), token_loss, device);
  job.tokens = shape.batch * shape.context;
  return job;
}

Job make_shaped_gpt(int rank, c10::Device device, const Shape& shape) {
  return gpt_job(model_of<Gpt>(shape), rank, device, shape);
}

Job make_qwen(int rank, c10::Device device, const Shape& shape) {
  auto model = model_of<Qwen>(shape);
  auto batch = token_batch(rank, shape);
  move(model, batch, device);
  return {.model = model.ptr(),
          .forward = [model, batch]() mutable { return model(batch.input, batch.target); },
          .loss = [](const at::Tensor& loss) { return loss; },
          .device = device,
          .tokens = shape.batch * shape.context};
}

struct Row {
  const char* name;
  c10::DeviceType device;
  Job (*make)(int rank, c10::Device device, const Shape& shape);
  int steps_per_block;
  Shape shape = {};
};
/// Qwen2.5-0.5B's.
constexpr Shape kQwen = {.blocks = 24,
                         .width = 896,
                         .heads = 14,
                         .context = 2048,
                         .batch = 8,
                         .vocabulary = 151936,
                         .kv_heads = 2,
                         .hidden = 4864};
constexpr Shape kSmallQwen = {.blocks = 2,
                              .width = 64,
                              .heads = 4,
                              .context = 64,
                              .batch = 2,
                              .vocabulary = 512,
                              .kv_heads = 2,
                              .hidden = 176};
const Row kJobs[] = {
    {"mlp", torch::kCPU, make_mlp, 200},
    {"net2000", torch::kCPU, make_net2000, 5},
    {"gpt", torch::kCPU, make_shaped_gpt, 3},
    {"qwen", torch::kCPU, make_qwen, 20, kSmallQwen},
    {"mlp", torch::kCUDA, make_mlp, 400},
    {"gpt", torch::kCUDA, make_shaped_gpt, 40, {.context = 256, .batch = 8}},
    {"gpt12x768",
     torch::kCUDA,
     make_shaped_gpt,
     10,
     {.blocks = 12, .width = 768, .heads = 12, .context = 1024, .batch = 16}},
    {"gpt2",
     torch::kCUDA,
     make_shaped_gpt,
     10,
     {.blocks = 12,
      .width = 768,
      .heads = 12,
      .context = 1024,
      .batch = 16,
      .vocabulary = 50304,
      .is_tied = true}},
    {"qwen", torch::kCUDA, make_qwen, 5, kQwen},
};

const Row& row_of(const std::string& name, c10::DeviceType device) {
  for (const auto& row : kJobs) {
    if (name == row.name && device == row.device) return row;
  }
  TORCH_CHECK_VALUE(false, "bench train: expected a job of --list for ", device, ", got '", name,
                    "'");
}

}  // namespace

std::vector<std::string> job_names(c10::DeviceType device) {
  std::vector<std::string> names;
  for (const auto& row : kJobs) {
    if (row.device == device) names.emplace_back(row.name);
  }
  return names;
}

Job make_job(const std::string& name, int rank, c10::Device device) {
  const auto& row = row_of(name, device.type());
  return row.make(rank, device, row.shape);
}

Job make_gpt(int rank, int blocks, bool has_memory) {
  const Shape shape{.blocks = blocks};
  std::optional<MetaInit> no_memory;
  if (!has_memory) no_memory.emplace();
  auto model = model_of<Gpt>(shape);
  no_memory.reset();
  return gpt_job(std::move(model), rank, torch::kCPU, shape);
}

Job make_brief_gpt(int blocks, c10::Device device) {
  const Shape shape = {.blocks = blocks, .context = 32, .batch = 2};
  return make_shaped_gpt(/*rank=*/0, device, shape);
}

int steps_per_block(const std::string& name, c10::DeviceType device) {
  return row_of(name, device).steps_per_block;
}

}  // namespace tessera::benchmarks
