// A run that is taken up again: what it goes on with, and what it refuses.
#include "data/tokenizer_json.h"
#include "train/train_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>

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
