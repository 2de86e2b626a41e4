// A run that is taken up again: what it goes on with, and what it refuses.
#include <tessera/serialize.h>

#include "data/tokenizer_json.h"
#include "train/train_run.h"

#include <ATen/ops/allclose.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <tuple>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

Words resume_words(const TrainingGround& ground, const std::string& run, const Words& further) {
  Words words = {TESSERA_TOOL, "train", "--resume", "--run", ground.run(run)};
  words.insert(words.end(), further.begin(), further.end());
  return words;
}

TEST(TrainConfig, StartsTheSameAnew) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("one", {"--prompt", "it's \"#1\"\n", "--steps", "4"}).status.ok());
  const auto config = ground.run("one") + "/config.toml";
  const auto result = ground.call({TESSERA_TOOL, "train", "--config", config});
  ASSERT_TRUE(result.status.ok()) << result.output;
  const auto folder = *fs::directory_iterator(ground.path() / "runs");
  const auto second = "runs/" + folder.path().filename().string();
  EXPECT_EQ(ground.losses("one"), ground.losses(second));
  EXPECT_EQ(ground.read("one", "config.toml"), ground.read(second, "config.toml"));
  EXPECT_EQ(ground.read("one", "sample.txt"), ground.read(second, "sample.txt"));
}

TEST(TrainResume, RefusesOtherSettingsAtOnceAndByName) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run").status.ok());
  const auto metrics = ground.read("run", "metrics.jsonl");
  for (const auto& [words, message] : std::vector<std::pair<Words, std::string>>{
           {{"--seed", "2"}, "seed is 1, but --seed is 2"},
           {{"--blocks", "3"}, "blocks is 2, but --blocks is 3"},
           {{"--context", "16"}, "context is 32, but --context is 16"},
           {{"--validation", "0.1"}, "validation is 0.05, but --validation is 0.1"}}) {
    const auto result = ground.call(resume_words(ground, "run", words));
    EXPECT_EQ(result.status.code, 2) << result.output;
    EXPECT_THAT(result.output, HasSubstr("step-00000012, whose " + message));
    EXPECT_THAT(result.output, Not(HasSubstr("the one before")));
    EXPECT_THAT(result.output, Not(HasSubstr(".weight")));
  }
  std::ofstream(ground.path() / "text" / "more.txt") << "other words\n";
  const auto result = ground.call(resume_words(ground, "run", {"--steps", "20"}));
  EXPECT_EQ(result.status.code, 2) << result.output;
  EXPECT_THAT(result.output,
              HasSubstr("the files under --data have changed: 'more.txt' is one too many"));
  EXPECT_EQ(ground.read("run", "metrics.jsonl"), metrics);
}

TEST(TrainResume, RefusesTextThatHasChangedInPlace) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run").status.ok());
  const auto file = ground.path() / "text" / "small.txt";
  const auto before = fs::last_write_time(file);
  {
    std::fstream text(file, std::ios::in | std::ios::out);
    text.seekp(5000).put('#');
  }
  fs::last_write_time(file, before);
  const auto result = ground.call(resume_words(ground, "run", {"--steps", "20"}));
  EXPECT_EQ(result.status.code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("whose data differs: the files under --data have changed: "
                                       "'small.txt' has other content; give those it was trained "
                                       "on, as they were, or train anew"));
}

TEST(TrainResume, TellsOfATokenizerThatHasChanged) {
  const TrainingGround ground;
  const auto write = [&](const data::testing::TokenizerJson& json) {
    std::ofstream(ground.path() / "letters.json") << json.text();
  };
  write({.merges = {{"t", "h"}, {"i", "n"}}});
  const Words tokenizer = {"--tokenizer", (ground.path() / "letters.json").string()};
  const auto first = ground.train("run", tokenizer);
  ASSERT_TRUE(first.status.ok()) << first.output;
  write({.merges = {{"t", "h"}, {"i", "s"}}});
  const auto result = ground.call(resume_words(ground, "run", {"--steps", "20"}));
  EXPECT_EQ(result.status.code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("tokenizer differs: letters.json has changed"));
}

/// The tokens are the same, and so is what is learned, on other ranks after a stop, too.
TEST(TrainShards, TrainAsTheTextThatTheyAreOf) {
  const TrainingGround ground;
  std::ofstream(ground.path() / "letters.json")
      << data::testing::TokenizerJson{.merges = {{"t", "h"}, {"i", "n"}, {"in", "g"}}}.text();
  const auto tokenizer = (ground.path() / "letters.json").string();
  const auto shards = (ground.path() / "shards").string();
  const auto written =
      ground.call({TESSERA_TOOL, "tokenize", shards, "--data", (ground.path() / "text").string(),
                   "--tokenizer", tokenizer, "--shard-tokens", "1000"});
  ASSERT_TRUE(written.status.ok()) << written.output;
  EXPECT_THAT(written.output, HasSubstr("train on them: tessera train --data " + shards));
  const auto of_text = ground.train("of-text", {"--tokenizer", tokenizer, "--eval-every", "6"});
  ASSERT_TRUE(of_text.status.ok()) << of_text.output;
  const Words of_shards = {"--data", shards, "--eval-every", "6"};
  const auto first = ground.train("of-shards", of_shards);
  ASSERT_TRUE(first.status.ok()) << first.output;
  EXPECT_EQ(ground.losses("of-shards"), ground.losses("of-text"));
  EXPECT_EQ(ground.validation_losses("of-shards"), ground.validation_losses("of-text"));
  EXPECT_EQ(ground.read("of-shards", "sample.txt"), ground.read("of-text", "sample.txt"));

  // What a run that was stopped at step 4 leaves.
  Words stopped = of_shards;
  stopped.insert(stopped.end(), {"--keep-last", "0"});
  ASSERT_TRUE(ground.train("stopped", stopped).status.ok());
  for (const char* step : {"step-00000012", "step-00000008"})
    fs::remove_all(fs::path(ground.run("stopped")) / "checkpoints" / step);
  const fs::path shard = ground.path() / "shards/shard-00001.tokens";
  fs::rename(shard, ground.path() / "away");
  const auto lacking = ground.call(resume_words(ground, "stopped", {"--ranks", "1"}));
  EXPECT_FALSE(lacking.status.ok());
  EXPECT_THAT(lacking.output, HasSubstr(shard.string()));
  fs::rename(ground.path() / "away", shard);
  for (const char* ranks : {"1", "4"}) {
    fs::copy(ground.run("stopped"), ground.run(ranks), fs::copy_options::recursive);
    const auto resumed = ground.call(resume_words(ground, ranks, {"--ranks", ranks}));
    ASSERT_TRUE(resumed.status.ok()) << resumed.output;
    EXPECT_THAT(resumed.output, HasSubstr("goes on after step 4"));
    EXPECT_LT(largest_difference(ground.losses(ranks), ground.losses("of-text")), 2e-4) << ranks;
  }
}

/// The model that a run has saved, by name.
std::map<std::string, at::Tensor> exported(const TrainingGround& ground, const std::string& run,
                                           int step, const Words& further = {}) {
  static int number = 0;
  const auto folder = ground.run("exported-" + std::to_string(++number));
  const auto name = "step-0000000" + std::to_string(step);
  Words words = {TESSERA_TOOL, "export", ground.run(run) + "/checkpoints/" + name, folder};
  words.insert(words.end(), further.begin(), further.end());
  const auto result = ground.call(words);
  EXPECT_TRUE(result.status.ok()) << result.output;
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [key, value] : read_safetensors(folder)) tensors.emplace(key, value);
  return tensors;
}

TEST(TrainAverages, AreThoseOfTheWeightsOfAllStepsInEveryLayout) {
  const TrainingGround ground;
  constexpr double kDecay = 0.6;
  const Words averaging = {"--ema", "0.6", "--steps", "5", "--eval-every", "5"};
  const auto run = [&](const std::string& name, Words further) {
    further.insert(further.end(), averaging.begin(), averaging.end());
    further.insert(further.end(), {"--save-every", "1", "--keep-last", "0"});
    const auto result = ground.train(name, further);
    EXPECT_TRUE(result.status.ok()) << result.output;
    EXPECT_THAT(result.output, HasSubstr("averages of the weights (--ema 0.6) are validated"));
  };
  /// By the weights that a run has saved after each step.
  const auto expect_averages = [&](const std::string& name) {
    auto expected = exported(ground, name, 1);
    for (int step = 2; step <= 5; ++step) {
      for (const auto& [key, value] : exported(ground, name, step))
        expected.at(key) = kDecay * expected.at(key) + (1 - kDecay) * value;
    }
    const auto averages = exported(ground, name, 5, {"--ema"});
    const auto weights = exported(ground, name, 5);
    ASSERT_EQ(averages.size(), expected.size());
    for (const auto& [key, value] : averages) {
      EXPECT_TRUE(at::allclose(value, expected.at(key), 1e-5, 1e-7)) << name << " " << key;
      EXPECT_FALSE(at::allclose(value, weights.at(key), 1e-5, 1e-7)) << name << " " << key;
    }
  };
  const std::vector<std::pair<std::string, Words>> layouts = {
      {"one", {"--ranks", "1"}},
      {"sharded", {"--parallel", "fully_shard"}},
      {"tp", {"--mesh", "tp=2"}},
      {"compiled", {"--compile"}}};
  for (const auto& [name, layout] : layouts) {
    run(name, layout);
    expect_averages(name);
    EXPECT_LT(largest_difference(ground.validation_losses(name), ground.validation_losses("one")),
              2e-4)
        << name;
  }
  // What is trained knows nothing of them, and they are what is validated.
  const auto without =
      ground.train("without", {"--ranks", "1", "--steps", "5", "--eval-every", "5"});
  ASSERT_TRUE(without.status.ok()) << without.output;
  EXPECT_EQ(ground.losses("one"), ground.losses("without"));
  EXPECT_GT(ground.validation_losses("one").at(5), ground.validation_losses("without").at(5));
}

TEST(TrainAverages, GoOnWithTheRunOnOtherRanks) {
  const TrainingGround ground;
  const Words averaging = {"--ema", "0.9", "--keep-last", "0", "--parallel", "fully_shard"};
  ASSERT_TRUE(ground.train("run", averaging).status.ok());
  fs::copy(ground.run("run"), ground.run("other"), fs::copy_options::recursive);
  fs::remove_all(fs::path(ground.run("run")) / "checkpoints/step-00000012");
  fs::remove_all(fs::path(ground.run("other")) / "checkpoints/step-00000012");
  const auto before = ground.validation_losses("run").at(12);
  for (const auto& [run, ranks, close] : {std::tuple{"run", "2", 0.0}, {"other", "1", 2e-4}}) {
    const auto result = ground.call(resume_words(ground, run, {"--ranks", ranks}));
    ASSERT_TRUE(result.status.ok()) << result.output;
    EXPECT_THAT(result.output, HasSubstr("goes on after step 8"));
    EXPECT_NEAR(ground.validation_losses(run).at(12), before, close);
  }
  const auto without = ground.call(resume_words(ground, "run", {"--ema", "0", "--steps", "14"}));
  EXPECT_EQ(without.status.code, 2);
  EXPECT_THAT(without.output, HasSubstr("ema is 0.9, but --ema is 0; give --ema as it was"));
}

TEST(TrainAverages, AreExportedOfRunsThatHaveThem) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run", {"--steps", "4"}).status.ok());
  const auto result =
      ground.call({TESSERA_TOOL, "export", ground.run("run"), ground.run("model"), "--ema"});
  EXPECT_EQ(result.status.code, 2);
  EXPECT_THAT(result.output, HasSubstr("--ema: expected a run with --ema, got"));
}

TEST(TrainResume, KeepsTheFirstCommandAndListsAllStarts) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run", {"--trace", "1"}).status.ok());
  ASSERT_NE(ground.read("run", "trace.json"), "");
  const auto first = nlohmann::json::parse(ground.read("run", "run.json"));
  const auto result =
      ground.call(resume_words(ground, "run", {"--steps", "14", "--ranks", "1", "--trace", "0"}));
  ASSERT_TRUE(result.status.ok()) << result.output;
  const auto facts = nlohmann::json::parse(ground.read("run", "run.json"));
  EXPECT_EQ(facts["command"], first["command"]);
  EXPECT_EQ(facts["started"], first["started"]);
  EXPECT_EQ(facts["world_size"], 1);
  ASSERT_EQ(facts["starts"].size(), 2);
  EXPECT_EQ(facts["starts"][0], first["starts"][0]);
  EXPECT_EQ(facts["starts"][0]["first_step"], 1);
  EXPECT_EQ(facts["starts"][1]["first_step"], 13);
  EXPECT_EQ(facts["starts"][1]["ranks"], 1);
  EXPECT_THAT(facts["starts"][1]["command"].get<std::string>(), HasSubstr("--resume"));
  // It was made by two ranks; the timeline is one of this start.
  EXPECT_EQ(ground.read("run", "trace.json"), "");
  for (const auto& event :
       nlohmann::json::parse(ground.read("run", "timeline.json"))["traceEvents"])
    EXPECT_EQ(event["pid"], 0);
  EXPECT_THAT(ground.read("run", "config.toml"), HasSubstr("steps = 14\n"));  // for later ones, too
}

TEST(TrainResume, OfARunAtItsEndHasNothingToDo) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run").status.ok());
  std::vector<std::string> before;
  for (const auto* file : {"metrics.jsonl", "run.json", "config.toml", "timeline.json"})
    before.push_back(ground.read("run", file));
  for (const auto& [words, message] : std::vector<std::pair<Words, std::string>>{
           {{}, "nothing to do: the run is at step 12 of 12; the last saved checkpoint is "},
           {{"--steps", "10"}, "nothing to do: the run is at step 12 of 10; the last saved "}}) {
    const auto result = ground.call(resume_words(ground, "run", words));
    EXPECT_TRUE(result.status.ok()) << result.output;
    EXPECT_THAT(result.output, HasSubstr(message));
    EXPECT_THAT(result.output, EndsWith("/step-00000012; go on with --resume --run " +
                                        ground.run("run") + " --steps MORE\n"));
  }
  std::vector<std::string> after;
  for (const auto* file : {"metrics.jsonl", "run.json", "config.toml", "timeline.json"})
    after.push_back(ground.read("run", file));
  EXPECT_EQ(after, before);
}

}  // namespace
}  // namespace tessera::testing
