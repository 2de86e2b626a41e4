// A transformer with everything tensor parallel: heads split, norms on parts of the sequence, the
// loss on parts of the classes; against one device, step by step.
#include "compose/on_device.h"
#include "parallel/models.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace tessera::testing {
namespace {

namespace F = torch::nn::functional;
constexpr int64_t kWidth = 16, kHeadSize = 4, kContext = 8, kWords = 22, kLayers = 2, kBatch = 3;
constexpr int64_t kHeads = kWidth / kHeadSize;

nn::LayerNorm norm() { return nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})); }

/// Query, key and value of three Linears, or of a fused one.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(bool is_fused) : is_fused(is_fused) {
    if (is_fused) {
      qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
    } else {
      query = register_module("query", nn::Linear(kWidth, kWidth));
      key = register_module("key", nn::Linear(kWidth, kWidth));
      value = register_module("value", nn::Linear(kWidth, kWidth));
    }
    out = register_module("out", nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {  // [batch, tokens, width]
    const auto parts =
        is_fused ? qkv(x).chunk(3, -1) : std::vector<at::Tensor>{query(x), key(x), value(x)};
    const auto heads = [&](int64_t i) {
      return parts[i].unflatten(-1, {-1, kHeadSize}).transpose(1, 2);
    };
    const auto mixed = at::scaled_dot_product_attention(heads(0), heads(1), heads(2), {}, 0,
                                                        /*is_causal=*/true);
    return out(mixed.transpose(1, 2).flatten(2));
  }
  bool is_fused;
  nn::Linear qkv{nullptr}, query{nullptr}, key{nullptr}, value{nullptr}, out{nullptr};
};
TESSERA_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(bool is_fused)
      : norm1(register_module("norm1", norm())),
        attention(register_module("attention", Attention(is_fused))),
        norm2(register_module("norm2", norm())),
        up(register_module("up", nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", nn::Linear(4 * kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = x + attention(norm1(x));
    return y + down(at::gelu(up(norm2(y))));
  }
  nn::LayerNorm norm1;
  Attention attention;
  nn::LayerNorm norm2;
  nn::Linear up, down;
};
TESSERA_MODULE(Block);

struct EmbedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) {
    return words(tokens) + places(at::arange(tokens.size(1), tokens.options()));
  }
  nn::Embedding words{register_module("words", nn::Embedding(kWords, kWidth))};
  nn::Embedding places{register_module("places", nn::Embedding(kContext, kWidth))};
};
TESSERA_MODULE(Embed);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(bool is_fused) {
    for (int64_t i = 0; i < kLayers; ++i) blocks->push_back(Block(is_fused));
  }
  at::Tensor forward(const at::Tensor& tokens) { return head(last(blocks(embed(tokens)))); }
  Embed embed{register_module("embed", Embed())};
  nn::Sequential blocks{register_module("blocks", nn::Sequential())};
  nn::LayerNorm last{register_module("last", norm())};
  nn::Linear head{register_module("head", nn::Linear(kWidth, kWords))};
};
TESSERA_MODULE(Transformer);

ParallelPlan plan_of(bool is_fused) {
  const auto from_sequence =
      PrepareModuleInput({.input_layouts = Shard(1), .desired_input_layouts = Replicate()});
  std::vector<PlanEntry> plan = {
      {"embed.words", RowwiseParallel()},
      {"embed",
       PrepareModuleOutput({.output_layouts = Replicate(), .desired_output_layouts = Shard(1)})},
      {"blocks.*.norm?", SequenceParallel()},
      {"blocks.*.attention", from_sequence},
      {"blocks.*.attention.out", RowwiseParallel({.output_layouts = Shard(1), .heads = kHeads})},
      {"blocks.*.up", ColwiseParallel({.input_layouts = Shard(1)})},
      {"blocks.*.down", RowwiseParallel({.output_layouts = Shard(1)})},
      {"last", SequenceParallel()},
      {"head", ColwiseParallel({.input_layouts = Shard(1), .use_local_output = false})}};
  if (is_fused)
    plan.push_back({"blocks.*.attention.qkv", ColwiseParallel({.heads = kHeads, .packed = 3})});
  for (const auto* name : {"query", "key", "value"}) {
    if (!is_fused)
      plan.push_back(
          {std::string("blocks.*.attention.") + name, ColwiseParallel({.heads = kHeads})});
  }
  return plan;
}

at::Tensor comparable(const std::string& name, const at::Tensor& parameter) {
  const auto value = full_value(parameter).detach();
  return name.find("qkv") == std::string::npos ? value : unpack_rows(value, 3, world_size());
}

void expect_equal_training(bool is_fused) {
  auto [plain, parallel] = device_twins<Transformer>(11, is_fused);
  plain->to(torch::kDouble);
  parallel->to(torch::kDouble);
  parallelize_module(parallel, mesh_of_all(run_device().type()), plan_of(is_fused));
  torch::optim::AdamW plain_optimizer(plain->parameters(), 1e-2);
  torch::optim::AdamW parallel_optimizer(parallel->parameters(), 1e-2);
  torch::manual_seed(17);
  for (int step = 0; step < 10; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const auto tokens = torch::randint(kWords, {kBatch, kContext}, torch::kLong).to(run_device());
    const auto target = torch::randint(kWords, {kBatch * kContext}, torch::kLong).to(run_device());
    plain_optimizer.zero_grad();
    const auto expected = F::cross_entropy(plain(tokens).flatten(0, 1), target);
    expected.backward();
    plain_optimizer.step();

    parallel_optimizer.zero_grad();
    at::Tensor loss;
    {
      const loss_parallel scope;
      loss = F::cross_entropy(parallel(tokens).flatten(0, 1), target);
      loss.backward();
    }
    parallel_optimizer.step();
    expect_equal(full_value(loss).detach(), expected.detach(), "loss");
    if (::testing::Test::HasFailure()) return;
  }
  const auto parameters = parallel->named_parameters();
  for (const auto& item : plain->named_parameters())
    expect_equal(comparable(item.key(), parameters[item.key()]), item.value().detach(), item.key());
}

class TransformerInParallel : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Every, TransformerInParallel,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {2})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, TransformerInParallel, ::testing::ValuesIn(cuda_backends()),
                         backend_name);

TEST_P(TransformerInParallel, TrainsLikeOneDevice) {
  run(4, [] { expect_equal_training(/*is_fused=*/false); });
}

TEST_P(TransformerInParallel, TrainsLikeOneDeviceWithAFusedWeight) {
  run(2, [] { expect_equal_training(/*is_fused=*/true); });
}

TEST_P(TransformerInParallel, NoOperatorGathersBehindTheUsersBack) {
  run(2, [] {
    auto parallel = on_device(seeded(11, [] { return Transformer(false); }));
    parallelize_module(parallel, mesh_of_all(run_device().type()), plan_of(false));
    const StrictSharding strict;
    const auto tokens = torch::randint(kWords, {kBatch, kContext}, torch::kLong).to(run_device());
    const auto target = torch::randint(kWords, {kBatch * kContext}, torch::kLong).to(run_device());
    const loss_parallel scope;
    comm_debug counted;
    const auto loss = F::cross_entropy(parallel(tokens).flatten(0, 1), target);
    // Each block gathers and scatters twice; the head gathers its input; the embedding sums.
    EXPECT_EQ(counted.counts().at("all_gather").collectives, 2 * kLayers + 1)
        << counted.to_string();
    EXPECT_EQ(counted.counts().at("reduce_scatter").collectives, 2 * kLayers)
        << counted.to_string();
    loss.backward();
    EXPECT_EQ(counted.counts().count("all_to_all"), 0U) << counted.to_string();
  });
}

}  // namespace
}  // namespace tessera::testing
