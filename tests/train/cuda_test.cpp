// `tessera train --device cuda`, on one rank and on several that share the device where there is
// one.
#include "support/device_cases.h"
#include "train/train_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <set>
#include <sstream>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

std::vector<json> lines_of(const TrainingGround& ground, const std::string& run) {
  std::vector<json> lines;
  std::istringstream stream(ground.read(run, "metrics.jsonl"));
  for (std::string line; std::getline(stream, line);) lines.push_back(json::parse(line));
  return lines;
}

/// The same job on the device; with a larger rate losses hang on the last bits of all before.
class TrainOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }

  static Words on_cuda(Words words = {}) {
    words.insert(words.end(), {"--device", "cuda", "--lr", "3e-3"});
    return words;
  }

  TrainingGround ground_;
};

class TrainLayoutOnCuda : public TrainOnCuda, public ::testing::WithParamInterface<Words> {};

TEST_P(TrainLayoutOnCuda, TrainsAsOneRankOfTheCpuDoes) {
  ASSERT_TRUE(ground_.train("cpu", {"--ranks", "1", "--lr", "3e-3"}).status.ok());
  const auto result = ground_.train("cuda", on_cuda(GetParam()));
  ASSERT_TRUE(result.status.ok()) << result.output;
  ASSERT_EQ(ground_.losses("cuda").size(), 12);
  const bool is_exact = std::ranges::count(GetParam(), "--precision") == 0;
  EXPECT_LT(largest_difference(ground_.losses("cpu"), ground_.losses("cuda")),
            is_exact ? 5e-3 : 0.05);
  for (const auto& line : lines_of(ground_, "cuda"))
    EXPECT_EQ(line.contains("host_lead_seconds"), line.contains("loss")) << line;
}

TEST_P(TrainLayoutOnCuda, GoesOnWhereItWasSaved) {
  const auto result = ground_.train("run", on_cuda(GetParam()));
  ASSERT_TRUE(result.status.ok()) << result.output;
  const auto straight = ground_.losses("run");
  fs::remove_all(fs::path(ground_.run("run")) / "checkpoints" / "step-00000012");
  fs::remove(fs::path(ground_.run("run")) / "metrics.jsonl");
  const auto resumed =
      ground_.call({TESSERA_TOOL, "train", "--resume", "--run", ground_.run("run")});
  ASSERT_TRUE(resumed.status.ok()) << resumed.output;
  EXPECT_THAT(resumed.output, HasSubstr("goes on after step 8"));
  ASSERT_EQ(ground_.losses("run").size(), 4);
  EXPECT_LT(largest_difference(ground_.losses("run"), straight), 1e-2);
}

INSTANTIATE_TEST_SUITE_P(
    , TrainLayoutOnCuda,
    ::testing::Values(Words{"--ranks", "1"}, Words{"--ranks", "2"}, Words{"--ranks", "4"},
                      Words{"--ranks", "2", "--parallel", "fully_shard"},
                      Words{"--ranks", "4", "--mesh", "dp=2,tp=2"},
                      Words{"--ranks", "1", "--precision", "bf16"},
                      Words{"--ranks", "2", "--precision", "bf16", "--attention", "math"}),
    [](const auto& info) {
      std::string name;
      for (const auto& word : info.param) {
        for (const char c : word) name += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
      }
      return name;
    });

TEST_F(TrainOnCuda, SurvivesTheDeathOfARankWithRestarts) {
  const auto words = on_cuda({"--ranks", "2", "--steps", "60"});
  ASSERT_TRUE(ground_.train("straight", words).status.ok());
  auto with_restarts = words;
  with_restarts.insert(with_restarts.end(), {"--max-restarts", "2"});
  auto job = ground_.start("run", with_restarts);
  ground_.await_step("run", 10);
  const auto ranks = ranks_of(job.pid());
  ASSERT_EQ(ranks.size(), 2) << job.output();
  kill(ranks[1], SIGKILL);
  EXPECT_EQ(end_of(job).code, 0) << job.output();
  EXPECT_THAT(job.output(), HasSubstr("restart 1 of 2"));
  EXPECT_EQ(ground_.losses("run").size(), 60);
  EXPECT_LT(largest_difference(ground_.losses("run"), ground_.losses("straight")), 5e-2);
}

TEST_F(TrainOnCuda, EndsBySignalWithItsLastStepSaved) {
  auto job = ground_.start("run", on_cuda({"--ranks", "2", "--steps", "100000"}));
  ground_.await_step("run", 5);
  job.signal(SIGTERM);
  EXPECT_EQ(end_of(job).code, 128 + SIGTERM) << job.output();
  char name[32];
  std::snprintf(name, sizeof name, "step-%08d", ground_.losses("run").rbegin()->first);
  EXPECT_EQ(ground_.checkpoints("run").back(), name);
}

TEST_F(TrainOnCuda, LeavesStepsOutThatAreNotFinite) {
  const auto result =
      ground_.train("run", {"--device", "cuda", "--ranks", "1", "--lr", "1e20", "--clip", "0",
                            "--warmup", "0", "--skip-nonfinite", "--steps", "10"});
  EXPECT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr("step left out"));
  EXPECT_THAT(ground_.read("run", "metrics.jsonl"), HasSubstr("\"nonfinite\""));
}

/// A model that keeps the device busy for longer than it takes to issue a step.
TEST_F(TrainOnCuda, HasTheHostAStepAheadAndKernelsInTheTrace) {
  const auto result = ground_.train(
      "run", {"--device", "cuda", "--ranks",      "1",   "--blocks", "4",  "--width", "1024",
              "--heads",  "16",   "--context",    "512", "--batch",  "16", "--steps", "16",
              "--lr",     "1e-4", "--save-every", "0",   "--sample", "0",  "--trace", "3"});
  ASSERT_TRUE(result.status.ok()) << result.output;
  int ahead = 0, steps = 0;
  for (const auto& line : lines_of(ground_, "run")) {
    if (!line.contains("host_lead_seconds")) continue;
    ++steps;
    ahead += line["host_lead_seconds"].get<double>() > line["step_seconds"].get<double>();
  }
  EXPECT_EQ(steps, 16);
  EXPECT_GE(ahead, 8) << "steps whose issue ended before the device had begun them";

  for (const auto* file : {"trace.json", "timeline.json"}) {
    std::set<int> threads;
    double first = 1e300, last = 0, first_kernel = 1e300, last_kernel = 0;
    for (const auto& event : json::parse(ground_.read("run", file))["traceEvents"]) {
      if (event["ph"] != "X") continue;
      const double begin = event["ts"], end = begin + event["dur"].get<double>();
      const bool is_kernel = event["cat"] == "kernel";
      (is_kernel ? first_kernel : first) = std::min(is_kernel ? first_kernel : first, begin);
      (is_kernel ? last_kernel : last) = std::max(is_kernel ? last_kernel : last, end);
      if (is_kernel) threads.insert(event["tid"].get<int>());
    }
    EXPECT_FALSE(threads.empty()) << file << " has no kernels";
    EXPECT_FALSE(threads.contains(0)) << "thread 0 is the host's";
    constexpr double kSlack = 2000;  // microseconds between two clocks
    EXPECT_GT(first_kernel, first - kSlack) << file;
    EXPECT_LT(last_kernel, last + kSlack) << file;
  }
}

}  // namespace
}  // namespace tessera::testing
