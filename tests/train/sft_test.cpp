// Fine-tuning: conversations in place of text, adapters in place of the whole model.
#include <tessera/lora.h>
#include <tessera/models.h>
#include <tessera/serialize.h>

#include "models/small_models.h"
#include "train/train_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kCloseLosses = 2e-4;

Words both(Words left, const Words& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

class FineTuning : public ::testing::Test {
 protected:
  FineTuning() {
    std::ofstream file(path());
    for (int i = 0; i < 120; ++i) {
      const std::string question = "say " + std::to_string(i % 10);
      const std::string answer(static_cast<size_t>(1 + i % 7), static_cast<char>('a' + i % 3));
      file << nlohmann::json({{"messages",
                               {{{"role", "user"}, {"content", question}},
                                {{"role", "assistant"}, {"content", answer}}}}})
                  .dump()
           << "\n";
    }
  }
  std::string path() const { return (ground_.path() / "talk.jsonl").string(); }
  Words words(const Words& further = {}) const {
    return both({"--sft", path(), "--context", "96"}, further);
  }
  /// Trains, which has to succeed; gives the losses.
  std::map<int, double> losses(const std::string& run, const Words& further) const {
    const auto result = ground_.train(run, words(further));
    EXPECT_TRUE(result.status.ok()) << result.output;
    return ground_.losses(run);
  }

  TrainingGround ground_;
};

TEST_F(FineTuning, HasTheLossesOfOneRankInEveryLayout) {
  const auto one = losses("one", {"--ranks", "1", "--eval-every", "6"});
  ASSERT_EQ(one.size(), 12U);
  EXPECT_LT(one.at(12), one.at(1) - 0.5);
  const std::map<std::string, Words> layouts = {
      {"replicate", {}},
      {"parts", {"--accumulate", "2"}},
      {"three", {"--ranks", "1", "--accumulate", "4"}},
      {"fully_shard", {"--parallel", "fully_shard", "--checkpoint-activations", "block"}},
      {"tp", {"--mesh", "tp=2"}},
      {"compiled", {"--ranks", "1", "--compile"}}};
  for (const auto& [name, layout] : layouts) {
    EXPECT_LT(largest_difference(losses(name, both(layout, {"--eval-every", "6"})), one),
              kCloseLosses)
        << name;
    EXPECT_LT(largest_difference(ground_.validation_losses(name), ground_.validation_losses("one")),
              kCloseLosses)
        << name;
  }
}

TEST_F(FineTuning, GoesOnWhereItWasStopped) {
  const Words accumulating = {"--accumulate", "2"};
  const auto straight = losses("run", accumulating);
  fs::remove_all(fs::path(ground_.run("run")) / "checkpoints" / "step-00000012");
  fs::remove(fs::path(ground_.run("run")) / "metrics.jsonl");
  const auto resumed =
      ground_.call({TESSERA_TOOL, "train", "--resume", "--run", ground_.run("run")});
  ASSERT_TRUE(resumed.status.ok()) << resumed.output;
  const auto again = ground_.losses("run");
  ASSERT_EQ(again.size(), 4U);
  EXPECT_EQ(largest_difference(again, straight), 0);
  std::ofstream(path(), std::ios::app) << R"({"prompt": "one", "completion": "more"})" << "\n";
  const auto changed = ground_.call(
      {TESSERA_TOOL, "train", "--resume", "--run", ground_.run("run"), "--steps", "14"});
  EXPECT_EQ(changed.status.code, 2) << changed.output;
  EXPECT_THAT(changed.output, HasSubstr("sft differs: the files of --sft have changed: "
                                        "'talk.jsonl' has other content"));
}

TEST_F(FineTuning, OfAdaptersIsExportedMergedAndAlone) {
  auto config = small_config(models::Family::Qwen2, /*is_tied=*/true);
  config.vocab_size = 256;
  config.max_position_embeddings = 128;
  auto net = small_model(config);
  const auto base = ground_.run("base");
  models::save_pretrained(net, base);
  const auto tuned = [&](const std::string& run, const Words& further) {
    Words without_sizes;
    const auto all =
        ground_.words(run, words(both({"--from", base, "--tokenizer", "bytes", "--lora", "4",
                                       "--lr", "1e-2", "--lora-targets", "q_proj", "v_proj"},
                                      further)));
    for (size_t i = 0; i < all.size(); ++i) {
      const bool is_size = all[i] == "--blocks" || all[i] == "--width" || all[i] == "--heads";
      is_size ? void(++i) : without_sizes.push_back(all[i]);
    }
    const auto result = ground_.call(without_sizes);
    EXPECT_TRUE(result.status.ok()) << result.output;
    EXPECT_THAT(result.output, HasSubstr("of them in adapters of rank 4"));
    return ground_.losses(run);
  };
  const auto one = tuned("one", {"--ranks", "1"});
  ASSERT_EQ(one.size(), 12U);
  EXPECT_LT(one.at(12), one.at(1) - 0.01);
  for (const auto& layout : {Words{"--parallel", "replicate"}, Words{"--parallel", "fully_shard"},
                             Words{"--mesh", "tp=2"}})
    EXPECT_LT(largest_difference(tuned(layout.back(), layout), one), kCloseLosses) << layout.back();

  const auto merged = ground_.run("merged"), adapters = ground_.run("adapters");
  const auto exported = ground_.call({TESSERA_TOOL, "export", ground_.run("fully_shard"), merged});
  ASSERT_TRUE(exported.status.ok()) << exported.output;
  const auto alone =
      ground_.call({TESSERA_TOOL, "export", ground_.run("fully_shard"), adapters, "--adapters"});
  ASSERT_TRUE(alone.status.ok()) << alone.output;
  auto whole = models::from_pretrained(merged), adapted = models::from_pretrained(base);
  lora(adapted, read_lora_options(adapters));
  load_lora(adapters, adapted);
  const auto tokens = small_batch().tokens;
  const at::Tensor before = models::from_pretrained(base)(tokens), after = whole(tokens);
  EXPECT_GT((after - before).abs().max().item<double>(), 1e-3);
  EXPECT_LE((after - adapted(tokens)).abs().max().item<double>(), 1e-4);
}

TEST_F(FineTuning, OfAdaptersGoesOn) {
  const Words words = {"--model", "llama", "--lora", "4", "--lr", "3e-3"};
  const auto straight = losses("run", both(words, {"--parallel", "fully_shard"}));
  EXPECT_LT(largest_difference(straight, losses("one", both(words, {"--ranks", "1"}))),
            kCloseLosses);
  fs::remove_all(fs::path(ground_.run("run")) / "checkpoints" / "step-00000012");
  fs::remove(fs::path(ground_.run("run")) / "metrics.jsonl");
  const auto resumed =
      ground_.call({TESSERA_TOOL, "train", "--resume", "--run", ground_.run("run")});
  ASSERT_TRUE(resumed.status.ok()) << resumed.output;
  EXPECT_EQ(largest_difference(ground_.losses("run"), straight), 0);
}

TEST_F(FineTuning, RefusesWhatDoesNotGoTogether) {
  const auto refused = [&](const Words& further) {
    const auto result = ground_.train("run", further);
    EXPECT_EQ(result.status.code, 2) << result.output;
    return result.output;
  };
  EXPECT_THAT(refused(words({"--data", ground_.path().string()})),
              HasSubstr("--sft: expected it without --data"));
  EXPECT_THAT(refused(words({"--validation-data", ground_.path().string()})),
              HasSubstr("--validation-data: expected it with --data"));
  EXPECT_THAT(refused({"--sft", "nowhere.jsonl"}),
              HasSubstr("'nowhere.jsonl', which is not there"));
  EXPECT_THAT(refused({"--chat-format", "plain"}), HasSubstr("expected it with --sft"));
  EXPECT_THAT(refused({"--lora-alpha", "8"}), HasSubstr("expected them with --lora RANK"));
  EXPECT_THAT(refused(words({"--lora", "4", "--lora-targets", "q_proj"})),
              HasSubstr("expected target 'q_proj' to name a linear layer"));
  EXPECT_THAT(refused(words({"--chat-format", "chatml"})),
              HasSubstr("--chat-format chatml: expected a tokenizer with the token <|im_start|>"));
  std::ofstream(path(), std::ios::app) << "{\"prompt\": \"one\"}\n";
  EXPECT_THAT(refused(words()),
              HasSubstr("talk.jsonl:121: expected a string for completion, got none"));
}

}  // namespace
}  // namespace tessera::testing
