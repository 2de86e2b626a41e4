// A model in stages over ranks.
#include "train/train_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr double kCloseInStages = 2e-4;

class TrainPipeline : public ::testing::Test {
 protected:
  void train(const std::string& run, Words words) const {
    words.insert(words.end(), {"--lr", "3e-3", "--eval-every", "4"});
    const auto result = ground_.train(run, words);
    ASSERT_TRUE(result.status.ok()) << run << ": " << result.output;
    ASSERT_EQ(ground_.losses(run).size(), 12U);
  }
  void expect_as_one(const std::string& run) const {
    EXPECT_LT(largest_difference(ground_.losses(run), ground_.losses("one")), kCloseInStages)
        << run;
    EXPECT_LT(largest_difference(ground_.validation_losses(run), ground_.validation_losses("one")),
              kCloseInStages)
        << run;
    EXPECT_EQ(ground_.read(run, "sample.txt"), ground_.read("one", "sample.txt")) << run;
  }
  ProgramResult resume(const std::string& run, const Words& further) const {
    fs::remove_all(fs::path(ground_.run(run)) / "checkpoints/step-00000012");
    Words words = {TESSERA_TOOL, "train", "--resume", "--run", ground_.run(run)};
    words.insert(words.end(), further.begin(), further.end());
    return ground_.call(words);
  }

  TrainingGround ground_;
};

TEST_F(TrainPipeline, HasTheLossesOfOneRankWithEverySchedule) {
  train("one", {"--ranks", "1"});
  const std::map<std::string, Words> layouts = {
      {"gpipe", {"--mesh", "pp=2", "--pipeline-schedule", "gpipe"}},
      {"1f1b", {"--mesh", "pp=2"}},
      {"interleaved", {"--mesh", "pp=2", "--pipeline-schedule", "interleaved"}},
      {"zero-bubble", {"--mesh", "pp=2", "--pipeline-schedule", "zero-bubble"}},
      {"zbv", {"--mesh", "pp=2", "--pipeline-schedule", "zbv-zero-bubble"}},
      {"four", {"--ranks", "4", "--mesh", "pp=4"}}};
  for (const auto& [name, layout] : layouts) {
    auto words = layout;
    words.insert(words.end(), {"--microbatches", "4"});
    train(name, words);
    expect_as_one(name);
  }
  train("uneven", {"--mesh", "pp=2", "--microbatches", "3"});  // of 2, 1 and 1 sequences
  expect_as_one("uneven");
  train("both", {"--ranks", "4", "--mesh", "pp=2,dp=2", "--microbatches", "2"});
  expect_as_one("both");
}

TEST_F(TrainPipeline, GoesOnWithoutStagesAndWithThem) {
  train("one", {"--ranks", "1"});
  train("stages", {"--mesh", "pp=2", "--microbatches", "2"});
  fs::copy(ground_.run("one"), ground_.run("into"), fs::copy_options::recursive);
  const auto without = resume("stages", {"--ranks", "2", "--mesh", "", "--microbatches", "8"});
  ASSERT_TRUE(without.status.ok()) << without.output;
  EXPECT_THAT(without.output, HasSubstr("goes on after step 8"));
  expect_as_one("stages");
  const auto with = resume("into", {"--ranks", "2", "--mesh", "pp=2", "--microbatches", "4"});
  ASSERT_TRUE(with.status.ok()) << with.output;
  expect_as_one("into");
  const auto exported =
      ground_.call({TESSERA_TOOL, "export", ground_.run("into"), ground_.run("model")});
  EXPECT_TRUE(exported.status.ok()) << exported.output;
}

TEST_F(TrainPipeline, NamesWhatIsNotFinite) {
  const auto result = ground_.train(
      "run", {"--mesh", "pp=2", "--microbatches", "2", "--lr", "1e20", "--clip", "0"});
  EXPECT_EQ(result.status.code, 3) << result.output;
  EXPECT_THAT(result.output, HasSubstr("expected a finite loss"));
}

TEST_F(TrainPipeline, RefusesWhatItDoesNotGoWith) {
  const auto in_stages = [](Words words) {
    words.insert(words.begin(), {"--mesh", "pp=2", "--microbatches", "4"});
    return words;
  };
  const std::vector<std::pair<Words, std::string>> refusals = {
      {in_stages({"--ranks", "4", "--mesh", "pp=2,tp=2"}), "without others than dp in --mesh"},
      {in_stages({"--parallel", "fully_shard", "--ranks", "4", "--mesh", "pp=2,dp=2"}),
       "without --parallel fully_shard"},
      {in_stages({"--model", "llama"}), "without models other than --model gpt"},
      {in_stages({"--precision", "bf16"}), "without --precision bf16"},
      {in_stages({"--compile"}), "without --compile"},
      {in_stages({"--accumulate", "2"}), "without --accumulate"},
      {in_stages({"--ema", "0.9"}), "without --ema"},
      {in_stages({"--blocks", "1", "--pipeline-schedule", "interleaved"}),
       "--mesh: expected at most 3 stages (--blocks, embeddings and head), got 4"},
      {in_stages({"--microbatches", "5"}),
       "--microbatches: expected at most 4, the sequences of a rank along the batch, got 5"},
      {in_stages({"--microbatches", "3", "--pipeline-schedule", "interleaved"}),
       "and a multiple of pp, got 3"},
      {{"--pipeline-schedule", "gpipe"}, "expected them with pp in --mesh"}};
  for (const auto& [words, message] : refusals) {
    const auto result = ground_.train("refused", words);
    EXPECT_EQ(result.status.code, 2) << message;
    EXPECT_THAT(result.output, HasSubstr(message));
  }
}

}  // namespace
}  // namespace tessera::testing
