// Sequences in parts over ranks.
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

constexpr double kCloseToOneRank = 2e-4;

class TrainContextParallel : public ::testing::Test {
 protected:
  void train(const std::string& run, Words words) const {
    words.insert(words.end(), {"--lr", "3e-3", "--eval-every", "4"});
    const auto result = ground_.train(run, words);
    ASSERT_TRUE(result.status.ok()) << result.output;
    ASSERT_EQ(ground_.losses(run).size(), 12U);
  }
  void expect_alike(const std::string& run, const std::string& reference) const {
    EXPECT_LT(largest_difference(ground_.losses(run), ground_.losses(reference)), kCloseToOneRank)
        << run;
    EXPECT_LT(
        largest_difference(ground_.validation_losses(run), ground_.validation_losses(reference)),
        kCloseToOneRank)
        << run;
    EXPECT_EQ(ground_.read(run, "sample.txt"), ground_.read(reference, "sample.txt")) << run;
  }

  TrainingGround ground_;
};

TEST_F(TrainContextParallel, HasTheLossesOfOneRankInEveryLayout) {
  train("one", {"--ranks", "1"});
  const std::map<std::string, Words> layouts = {
      {"two", {"--mesh", "cp=2"}},
      {"four", {"--ranks", "4", "--mesh", "cp=4"}},
      {"both", {"--ranks", "4", "--mesh", "dp=2,cp=2"}},
      {"alone", {"--ranks", "1", "--mesh", "cp=1", "--accumulate", "2"}},
      {"parts", {"--mesh", "cp=2", "--accumulate", "2"}},
      {"sharded", {"--ranks", "4", "--mesh", "dp=2,cp=2", "--parallel", "fully_shard"}},
      {"sharded along it", {"--mesh", "cp=2", "--parallel", "fully_shard"}}};
  for (const auto& [name, layout] : layouts) {
    train(name, layout);
    expect_alike(name, "one");
  }
  // A run goes on without it.
  fs::remove_all(fs::path(ground_.run("both")) / "checkpoints/step-00000012");
  const auto resumed = ground_.call({TESSERA_TOOL, "train", "--resume", "--run",
                                     ground_.run("both"), "--ranks", "1", "--mesh", ""});
  ASSERT_TRUE(resumed.status.ok()) << resumed.output;
  EXPECT_THAT(resumed.output, HasSubstr("goes on after step 8"));
  expect_alike("both", "one");
}

TEST_F(TrainContextParallel, OfPublishedModelsHasTheLossesOfOneRank) {
  for (const std::string kind : {"llama", "gpt2"}) {
    train(kind, {"--ranks", "1", "--model", kind});
    train(kind + "-cp", {"--mesh", "cp=2", "--model", kind});
    expect_alike(kind + "-cp", kind);
    train(kind + "-again", {"--ranks", "4", "--mesh", "dp=2,cp=2", "--model", kind, "--parallel",
                            "fully_shard", "--checkpoint-activations", "block"});
    expect_alike(kind + "-again", kind);
  }
}

TEST_F(TrainContextParallel, RefusesWhatItDoesNotGoWith) {
  const std::vector<std::pair<Words, std::string>> refusals = {
      {{"--ranks", "4", "--mesh", "cp=2,tp=2"}, "--mesh: expected cp without tp in --mesh"},
      {{"--mesh", "cp=2", "--dropout", "0.1"}, "--mesh: expected cp without --dropout"},
      {{"--mesh", "cp=2", "--compile"}, "--mesh: expected cp without --compile"},
      {{"--mesh", "cp=2", "--checkpoint-activations", "block"},
       "--mesh: expected cp without --checkpoint-activations of --model gpt"},
      {{"--mesh", "cp=2", "--context", "30"},
       "--context: expected a multiple of 4 (two chunks of a sequence for each rank along cp), got "
       "30; the nearest is 32"},
      {{"--mesh", "cp=2,dp=1"}, "expected pp, replicas, dp, cp and tp once each, in this order"},
      {{"--ranks", "4", "--mesh", "replicas=2,cp=2", "--parallel", "hybrid"},
       "--mesh: expected cp without --parallel hybrid"}};
  for (const auto& [words, message] : refusals) {
    const auto result = ground_.train("refused", words);
    EXPECT_EQ(result.status.code, 2) << message;
    EXPECT_THAT(result.output, HasSubstr(message));
  }
}

}  // namespace
}  // namespace tessera::testing
