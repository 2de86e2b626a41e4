#include "jobs.h"

#include <tessera/nn.h>
#include <tessera/nn/meta_init.h>

#include <torch/torch.h>

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

constexpr int64_t kGptBatch = 4;
constexpr int64_t kContext = 128;
constexpr int64_t kVocabulary = 256;
constexpr int64_t kWidth = 256;
constexpr int64_t kHeads = 4;
constexpr int kTrainedBlocks = 6;

class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(int blocks = kTrainedBlocks)
      : tokens_(register_module("tokens", tnn::Embedding(kVocabulary, kWidth))),
        positions_(register_module("positions", tnn::Embedding(kContext, kWidth))) {
    register_module("blocks", blocks_);
    for (int i = 0; i < blocks; ++i) blocks_->push_back(Block(kWidth, kHeads));
    norm_ = register_module("norm", tnn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    head_ = register_module("head",
                            tnn::Linear(torch::nn::LinearOptions(kWidth, kVocabulary).bias(false)));
  }

  at::Tensor forward(const at::Tensor& ids) {  // [batch, context] -> [batch, context, vocabulary]
    auto x = tokens_(ids) + positions_(torch::arange(ids.size(1)));
    for (const auto& block : *blocks_) x = block->as<Block>()->forward(x);
    return head_(norm_(x));
  }

 private:
  tnn::Embedding tokens_;
  tnn::Embedding positions_;
  torch::nn::ModuleList blocks_;
  tnn::LayerNorm norm_{nullptr};
  tnn::Linear head_{nullptr};
};
TESSERA_MODULE(Gpt);

Batch mlp_batch() {
  auto input = torch::rand({32, 50});
  return {input, torch::rand({32, 8})};
}

Batch net2000_batch() {
  auto input = torch::randn({16, 2000});
  return {input, torch::randn({16, 2000})};
}

Batch gpt_batch() {
  const auto ids = torch::randint(kVocabulary, {kGptBatch, kContext + 1}, torch::kLong);
  return {ids.narrow(1, 0, kContext).contiguous(), ids.narrow(1, 1, kContext).contiguous()};
}

at::Tensor squared_error(const at::Tensor& output, const at::Tensor& target) {
  return F::mse_loss(output, target);
}

at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return F::cross_entropy(logits.view({-1, logits.size(-1)}), targets.view({-1}));
}

template <class Model, class... A>
Model model_of(A... options) {
  torch::manual_seed(kWeightSeed);
  return Model(options...);
}

template <class Model, Batch (*make_batch)(),
          at::Tensor (*loss)(const at::Tensor&, const at::Tensor&)>
Job job_of(int rank, Model model) {
  torch::manual_seed(kBatchSeed + static_cast<uint64_t>(rank));
  const auto batch = make_batch();
  return {.model = model.ptr(),
          .forward = [model, batch]() mutable { return model(batch.input); },
          .loss = [batch](const at::Tensor& output) { return loss(output, batch.target); }};
}

template <class Model, Batch (*make_batch)(),
          at::Tensor (*loss)(const at::Tensor&, const at::Tensor&)>
Job make(int rank) {
  return job_of<Model, make_batch, loss>(rank, model_of<Model>());
}

Gpt gpt_without_memory(int blocks) {
  const MetaInit no_memory;
  return model_of<Gpt>(blocks);
}

struct Row {
  const char* name;
  Job (*make)(int rank);
  int steps_per_block;
};
constexpr Row kJobs[] = {
    {"mlp", make<Mlp, mlp_batch, squared_error>, 200},
    {"net2000", make<Net2000, net2000_batch, squared_error>, 5},
    {"gpt", make<Gpt, gpt_batch, token_loss>, 3},
};

const Row& row_of(const std::string& name) {
  for (const auto& row : kJobs) {
    if (name == row.name) return row;
  }
  TORCH_CHECK_VALUE(false, "bench train: expected a job of --list, got '", name, "'");
}

}  // namespace

std::vector<std::string> job_names() {
  std::vector<std::string> names;
  for (const auto& row : kJobs) names.emplace_back(row.name);
  return names;
}

Job make_job(const std::string& name, int rank) { return row_of(name).make(rank); }

Job make_gpt(int rank, int blocks, bool has_memory) {
  return job_of<Gpt, gpt_batch, token_loss>(
      rank, has_memory ? model_of<Gpt>(blocks) : gpt_without_memory(blocks));
}

int steps_per_block(const std::string& name) { return row_of(name).steps_per_block; }

}  // namespace tessera::benchmarks
