// What is told once, by one process, before anything is made.
#include "support/variables.h"
#include "train/train_run.h"

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct Refusal {
  Words words;
  const char* message;
};
class TrainRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(TrainRefuses, BeforeAnythingStarts) {
  const TrainingGround ground;
  std::ofstream(ground.path() / "bad.toml") << "blcks = 2\n";
  std::ofstream(ground.path() / "large.toml") << std::string((1 << 20) + 1, '#');
  std::ofstream(ground.path() / "empty.txt");
  std::ofstream(ground.path() / "file");
  auto words = ground.words("", GetParam().words);
  words.erase(words.begin() + 2, words.begin() + 4);  // --run
  const auto result = ground.call(words);
  EXPECT_EQ(result.status.code, 2) << result.output;
  EXPECT_THAT(result.output, StartsWith("tessera train: "));
  EXPECT_THAT(result.output, HasSubstr(GetParam().message));
  EXPECT_EQ(std::ranges::count(result.output, '\n'), 1) << result.output;  // said once
  std::error_code error;
  EXPECT_TRUE(!fs::exists(ground.path() / "runs") || fs::is_empty(ground.path() / "runs", error));
}

INSTANTIATE_TEST_SUITE_P(
    , TrainRefuses,
    ::testing::Values(
        Refusal{{"--parallel", "fully_shart"}, "did you mean fully_shard?"},
        Refusal{{"--blcks", "2"}, "did you mean --blocks?"},
        Refusal{{"--config", "bad.toml"}, "did you mean blocks?"},
        Refusal{{"--heads", "3"}, "expected a multiple of --heads 3"},
        Refusal{{"--batch", "5"}, "expected a multiple of 2"},
        Refusal{{"--mesh", "dp=3"}, "expected 2 ranks"},
        Refusal{{"--mesh", "replica=2"}, "did you mean replicas?"},
        Refusal{{"--mesh", "tp=2,dp=1"}, "in this order"},
        Refusal{{"--parallel", "hybrid"}, "replicas=R,dp=D"},
        Refusal{{"--parallel", "hybrid", "--mesh", "replicas=2"}, "replicas=R,dp=D"},
        Refusal{{"--parallel", "fully_shard", "--mesh", "tp=2"}, "expected dp in --mesh"},
        Refusal{{"--comm-hook", "fp16", "--mesh", "tp=2"}, "ranks along dp"},
        Refusal{{"--steps", "many"}, "got 'many'"},
        Refusal{{"--comm-hook", "fp16", "--parallel", "fully_shard"},
                "expected --parallel replicate and ranks along dp"},
        Refusal{{"--steps", "0"}, "the nearest is 1"}, Refusal{{"--data", "/nowhere"}, "/nowhere"},
        Refusal{{"--data", "empty.txt"}, "empty.txt"},
        Refusal{{"--context", "100000"}, "shorter --context"},
        Refusal{{"--batch", "1000000000"}, "expected batches that fit into the "},
        Refusal{{"--batch", "1073741824", "--ranks", "1"}, "lower --batch, or raise --accumulate"},
        Refusal{{"--width", "1000000"}, "--blocks, --width, --context: expected a model that fits"},
        Refusal{{"--blocks", "60000", "--width", "8388608"},
                "expected a model that fits into the "},
        Refusal{{"--blocks", "100000"}, "the nearest is 65536"},
        Refusal{{"--sample", "1000000000"}, "the nearest is 1048576"},
        Refusal{{"--timeout", "0"}, "--timeout: expected a number from 1 to 1e+06, got '0'"},
        Refusal{{"--minutes", "-1"}, "--minutes: expected a number from 0 to 1e+06"},
        Refusal{{"--config", "/dev/zero"}, "got '/dev/zero', which is a device"},
        Refusal{{"--config", "large.toml"}, "got 'large.toml', which has more than 1 MiB"},
        Refusal{{"--mesh", "dp=9223372036854775807,tp=2"}, "expected at most 1048576 ranks"},
        Refusal{{"--mesh", "dp=1048576,tp=1048576"}, "which has 1099511627776"},
        Refusal{{"--mesh", "dp=9223372036854775808,tp=2"}, "expected at most 1048576 ranks"},
        Refusal{{"--mesh", "dp=99999999999999999999x"}, "expected NAME=RANKS"},
        Refusal{{"--mesh", "dp=-99999999999999999999"}, "expected NAME=RANKS"},
        Refusal{{"--tokenizer", "/nowhere.json"}, "/nowhere.json"},
        Refusal{{"--run", "/"}, "got '/', which is the root of the file system"},
        Refusal{{"--run", "/tmp/.."}, "which is the root of the file system"},
        Refusal{{"--run", "text"},
                "got 'text', which holds other files and no run; name one in it"},
        Refusal{{"--run", "."}, "which holds other files and no run"},
        Refusal{{"--run", "file"}, "is a file"}, Refusal{{"--run", "file/run"}, "is a file"},
        Refusal{{"--resume"}, "found none; name one with --run"},
        Refusal{{"--resume", "--run", "text"}, "found no config.toml"}),
    [](const auto& info) {
      auto name = std::to_string(info.index);  // words may differ in what names can't hold
      for (const auto& word : info.param.words) {
        for (const char c : word) name += std::isalnum(c) != 0 ? c : '_';
      }
      return name;
    });

TEST(TrainRefusesARunFolder, ThatIsTheHomeFolder) {
  const TrainingGround ground;
  fs::create_directory(ground.run("home"));
  const Variables variables({std::pair("HOME", ground.run("home"))});
  const auto result = ground.train("home");
  EXPECT_EQ(result.status.code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("home', which is the home folder; name one in it"));
  EXPECT_TRUE(fs::is_empty(ground.run("home")));
}

/// Ranks on different hosts, with copies of the data that are not.
TEST(TrainRefusesData, ThatDiffersBetweenRanks) {
  const TrainingGround ground;
  for (const auto* rank : {"0", "1"}) {
    fs::create_directory(ground.path() / rank);
    fs::copy(ground.path() / "text" / "small.txt", ground.path() / rank / "small.txt");
  }
  {
    std::fstream text(ground.path() / "1" / "small.txt", std::ios::in | std::ios::out);
    text.seekp(5000).put('#');
  }
  Words words = {TESSERA_TOOL, "run", "-n", "2",  "--quiet-on",
                 "3",          "--",  "sh", "-c", "exec \"$@\" --data $TESSERA_RANK",
                 "sh"};
  const auto train = ground.words("run", {"--data", ""});
  words.insert(words.end(), train.begin(), train.end() - 2);
  const auto result = ground.call(words);
  EXPECT_EQ(result.status.code, 3) << result.output;
  EXPECT_THAT(result.output,
              HasSubstr("expected the same text on all ranks, but rank 1 finds other files under "
                        "--data than rank 0: 'small.txt' has other content"));
}

TEST(TrainRefusesADevice, ThatIsNotThere) {
  if (at::hasCUDA()) GTEST_SKIP() << "there is a GPU";
  const TrainingGround ground;
  const auto result = ground.train("run", {"--device", "cuda"});
  EXPECT_EQ(result.status.code, 2);
  EXPECT_THAT(result.output, StartsWith("tessera train: --device cuda: expected a GPU"));
  EXPECT_THAT(result.output, HasSubstr("use --device cpu"));
  EXPECT_EQ(std::ranges::count(result.output, '\n'), 1) << result.output;
  EXPECT_FALSE(fs::exists(ground.run("run")));
}

TEST(TrainRefusesAFolder, WithoutText) {
  const TrainingGround ground;
  const auto folder = ground.path() / "empty";
  fs::create_directory(folder);
  const auto result = ground.train("run", {"--data", folder.string()});
  EXPECT_EQ(result.status.code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("tessera train: --data: expected text in '"));
}

/// Under a launcher that is not ours the ranks themselves find out, and one of them tells.
TEST(TrainRefusesOnce, UnderAnotherLauncher) {
  const TrainingGround ground;
  auto words = ground.words("run", {"--data", "/nowhere"});
  words.insert(words.begin(), {TESSERA_TOOL, "run", "-n", "3", "--quiet-on", "2", "--"});
  words.insert(words.end(), {"--batch", "3"});
  const auto result = ground.call(words);
  EXPECT_EQ(result.status.code, 2);
  EXPECT_THAT(result.output, StartsWith("[0] tessera train: --data: expected files and folders"));
  EXPECT_EQ(std::ranges::count(result.output, '\n'), 1) << result.output;
}

}  // namespace
}  // namespace tessera::testing
