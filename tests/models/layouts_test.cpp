// Models over several ranks: loading, a step and saving are those of one.
#include <tessera/dtensor.h>
#include <tessera/fully_shard.h>
#include <tessera/models.h>
#include <tessera/parallelize.h>

#include "models/small_models.h"
#include "state/files/disk.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <ostream>
#include <stdexcept>
#include <tuple>

namespace tessera::testing {
namespace {

using models::CausalLM;
using models::Family;

enum class Spread { TensorParallel, FullyShard, FullyShardFromMeta, Both };

constexpr const char* kSpreads[] = {"TensorParallel", "FullyShard", "FullyShardFromMeta", "Both"};

void shard(CausalLM& net, const FullyShardOptions& options) {
  for (const auto& block : net->blocks()) fully_shard(block, options);
  fully_shard(net, options);
}

/// With other values than those that are saved.
CausalLM spread_model(const models::DecoderConfig& config, Spread spread) {
  if (spread == Spread::FullyShardFromMeta) {
    auto net = [&] {
      const MetaInit no_memory;
      return CausalLM(config);
    }();
    shard(net, {.param_init_fn = models::param_init_fn(net)});
    return net;
  }
  auto net = small_model(config, 99);
  if (spread == Spread::FullyShard) {
    shard(net, {});
    return net;
  }
  const int64_t copies = spread == Spread::Both ? 2 : 1;
  const auto mesh = init_device_mesh(at::kCPU, {copies, world_size() / copies}, {"dp", "tp"});
  parallelize_module(net, mesh["tp"], models::tensor_plan(net));
  if (spread == Spread::Both) shard(net, {.mesh = mesh["dp"]});
  return net;
}

/// The loss before a step of SGD.
at::Tensor train_step(CausalLM& net) {
  const auto batch = small_batch();
  torch::optim::SGD optimizer(net->parameters(), 0.5);
  const auto loss = net->loss(batch.tokens, batch.targets);
  loss.backward();
  optimizer.step();
  return loss.detach();
}

using Case = std::tuple<Family, bool, Spread>;
class ModelLayoutsOnThreads : public ::testing::TestWithParam<Case> {};

TEST_P(ModelLayoutsOnThreads, LoadTrainAndSaveAsOneRankDoes) {
  const auto [family, is_tied, spread] = GetParam();
  const auto config = small_config(family, is_tied);
  const TemporaryFolder folder;
  const auto start = (folder.path() / "start").string(), one = (folder.path() / "one").string(),
             all = (folder.path() / "all").string();
  auto reference = small_model(config);
  models::save_pretrained(reference, start, {.max_shard_bytes = 9000});
  const at::Tensor logits = reference(small_batch().tokens).detach();
  const auto loss = train_step(reference);
  models::save_pretrained(reference, one);
  run_threads(spread == Spread::Both ? 4 : 2, [&, spread = spread] {
    auto net = spread_model(config, spread);
    models::load_pretrained(start, net);
    const at::Tensor own = net(small_batch().tokens).detach();
    EXPECT_LE((own - logits).abs().max().item<double>(), 1e-5);
    EXPECT_NEAR(train_step(net).item<double>(), loss.item<double>(), 1e-5);
    models::save_pretrained(net, all);
  });
  expect_same_files(all, one);
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& chosen) {
  const auto [family, is_tied, spread] = chosen.param;
  return std::string(models::name_of(family)) + (is_tied ? "Tied" : "Untied") +
         kSpreads[static_cast<size_t>(spread)];
}

INSTANTIATE_TEST_SUITE_P(
    Families, ModelLayoutsOnThreads,
    ::testing::Combine(::testing::Values(Family::GPT2, Family::Llama, Family::Qwen2, Family::Qwen3),
                       ::testing::Bool(),
                       ::testing::Values(Spread::TensorParallel, Spread::FullyShard,
                                         Spread::FullyShardFromMeta, Spread::Both)),
    name_of_case);

TEST(ModelReadingOnThreads, EachRankReadsItsOwnBytes) {
  auto config = small_config(Family::Llama, true);
  config.vocab_size = 40000;
  const TemporaryFolder folder;
  const auto path = folder.path().string();
  models::save_pretrained(small_model(config), path);
  const auto bytes = std::filesystem::file_size(folder.path() / "model.safetensors");
  const auto before = state::bytes_read_so_far();
  run_threads(2, [&] {
    auto net = spread_model(config, Spread::FullyShard);
    models::load_pretrained(path, net);
  });
  EXPECT_LT(state::bytes_read_so_far() - before, bytes + bytes / 4);
}

TEST(ModelStartOnThreads, ShardedModelsStartAsInTransformers) {
  auto config = small_config(Family::GPT2, false);
  config.vocab_size = 4000;
  config.hidden_size = config.intermediate_size = 64;
  run_threads(2, [&] {
    const auto net = spread_model(config, Spread::FullyShardFromMeta);
    for (const auto& item : net->named_parameters()) {
      const auto& name = item.key();
      const auto value = DTensor::of(item.value().detach()).full_tensor();
      if (value.dim() == 2) {
        const auto expected = name.ends_with("c_proj.weight") ? 0.02 / std::sqrt(4.0) : 0.02;
        EXPECT_NEAR(value.std().item<double>(), expected, 1e-3) << name;
      } else {
        const auto expected =
            name.ends_with("weight") ? at::ones_like(value) : at::zeros_like(value);
        EXPECT_TRUE(at::equal(value, expected)) << name;
      }
    }
  });
}

class ModelUnitsOnThreads : public ::testing::Test {
 protected:
  static std::shared_ptr<torch::nn::Module> part_of(const CausalLM& net, const std::string& name) {
    for (const auto& module : net->named_modules()) {
      if (module.key() == name) return module.value();
    }
    throw std::out_of_range(name);
  }
  /// Of this rank, of two.
  static SmallBatch own_batch() {
    const auto all = small_batch();
    return {all.tokens.narrow(0, rank(), 1), all.targets.narrow(0, rank(), 1)};
  }
};

TEST_F(ModelUnitsOnThreads, HeadsInsideAreRefusedByName) {
  for (const auto family : {Family::GPT2, Family::Qwen3}) {
    const auto config = small_config(family, /*is_tied=*/false);
    auto reference = small_model(config);
    const at::Tensor logits = reference(small_batch().tokens).detach();
    run_threads(2, [&] {
      auto net = small_model(config);
      fully_shard(part_of(net, "lm_head"));
      shard(net, {});
      const auto batch = own_batch();
      const auto message = message_of([&] { net->loss(batch.tokens, batch.targets); });
      EXPECT_NE(message.find("CausalLM::loss: expected 'lm_head.weight' to be whole"),
                std::string::npos)
          << message;
      const at::Tensor own = net(batch.tokens).detach();
      EXPECT_LE((own - logits.narrow(0, rank(), 1)).abs().max().item<double>(), 1e-5);
    });
  }
}

TEST_F(ModelUnitsOnThreads, TiedEmbeddingsInsideAreRefusedByName) {
  const std::pair<Family, std::string> rows[] = {{Family::GPT2, "transformer.wte"},
                                                 {Family::Llama, "model.embed_tokens"}};
  for (const auto& [family, name] : rows) {
    run_threads(2, [&, family = family, name = name] {
      auto net = small_model(small_config(family, /*is_tied=*/true));
      fully_shard(part_of(net, name));
      shard(net, {});
      const auto batch = own_batch();
      const auto expected = ": expected '" + name + ".weight' to be whole";
      for (const auto& message : {message_of([&] { net->loss(batch.tokens, batch.targets); }),
                                  message_of([&] { net(batch.tokens); })})
        EXPECT_NE(message.find(expected), std::string::npos) << message;
    });
  }
}

/// An embedding that is not the head may be a unit: each rank has a batch of its own.
TEST_F(ModelUnitsOnThreads, OtherEmbeddingsTrainAsOneRankDoes) {
  const auto config = small_config(Family::Llama, /*is_tied=*/false);
  const TemporaryFolder folder;
  const auto one = (folder.path() / "one").string(), all = (folder.path() / "all").string();
  auto reference = small_model(config);
  train_step(reference);
  models::save_pretrained(reference, one);
  run_threads(2, [&] {
    auto net = small_model(config);
    fully_shard(part_of(net, "model.embed_tokens"));
    shard(net, {});
    const auto batch = own_batch();
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    net->loss(batch.tokens, batch.targets).backward();
    optimizer.step();
    models::save_pretrained(net, all);
  });
  expect_same_files(all, one);
}

TEST(ModelSavingErrorsOnThreads, OtherSizesOfFiles) {
  const TemporaryFolder folder;
  run_threads(2, [&] {
    const auto model = small_model(small_config(Family::Qwen2, true));
    const auto message = message_of([&] {
      models::save_pretrained(model, folder.path().string(),
                              {.max_shard_bytes = 1000 + 1000 * rank()});
    });
    EXPECT_NE(message.find("save_pretrained: expected the same max_shard_bytes on all ranks, got "
                           "1000 on rank 0 and 2000 on rank 1"),
              std::string::npos)
        << message;
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(ModelLoadingErrorsOnThreads, OneRanksErrorIsThatOfAll) {
  const TemporaryFolder folder;
  const auto path = folder.path().string();
  models::save_pretrained(small_model(small_config(Family::Qwen2, true)), path);
  run_threads(2, [&] {
    const auto family = rank() == 0 ? Family::Qwen2 : Family::Qwen3;
    CausalLM net = small_model(small_config(family, true), 5);
    const auto before = net->parameters().front().clone();
    try {
      models::load_pretrained(path, net);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const c10::ValueError& error) {
      const std::string message = error.what_without_backtrace();
      EXPECT_NE(message.find("load_pretrained: rank 1: "), std::string::npos) << message;
      EXPECT_NE(message.find("missing: 'model.layers.0.self_attn.q_norm.weight'"),
                std::string::npos)
          << message;
    }
    EXPECT_TRUE(at::equal(net->parameters().front(), before));
  });
}

}  // namespace
}  // namespace tessera::testing
