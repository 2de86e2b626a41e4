// `tessera train --device cuda`, on one rank and on several that share the device where there is
// one.
#include <tessera/models.h>

#include "models/small_models.h"
#include "support/device_cases.h"
#include "train/train_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

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

/// Rows of several conversations, whose attention has a mask, and frozen parameters.
TEST_F(TrainOnCuda, LearnsAnswersByAdaptersAsTheCpuDoes) {
  const auto path = (ground_.path() / "talk.jsonl").string();
  {
    std::ofstream file(path);
    for (int i = 0; i < 80; ++i) {
      const std::string answer(static_cast<size_t>(1 + i % 7), 'a');
      file << json({{"prompt", "say " + std::to_string(i)}, {"completion", answer}}).dump() << "\n";
    }
  }
  const Words words = {"--ranks", "1", "--sft", path, "--context", "96", "--lora", "4"};
  auto on_cpu = words;
  on_cpu.insert(on_cpu.end(), {"--lr", "3e-3"});
  ASSERT_TRUE(ground_.train("cpu", on_cpu).status.ok());
  for (const auto& layout : {Words{}, Words{"--parallel", "fully_shard"}, Words{"--compile"}}) {
    auto all = words;
    all.insert(all.end(), layout.begin(), layout.end());
    const auto run = "cuda" + (layout.empty() ? "" : layout.back());
    const auto result = ground_.train(run, on_cuda(all));
    ASSERT_TRUE(result.status.ok()) << result.output;
    EXPECT_LT(largest_difference(ground_.losses("cpu"), ground_.losses(run)), 5e-3) << run;
  }
}

class TrainLayoutOnCuda : public TrainOnCuda, public ::testing::WithParamInterface<Words> {};

TEST_P(TrainLayoutOnCuda, TrainsAsOneRankOfTheCpuDoes) {
  ASSERT_TRUE(ground_.train("cpu", {"--ranks", "1", "--lr", "3e-3"}).status.ok());
  const auto result = ground_.train("cuda", on_cuda(GetParam()));
  ASSERT_TRUE(result.status.ok()) << result.output;
  ASSERT_EQ(ground_.losses("cuda").size(), 12);
  const bool is_exact = std::ranges::count(GetParam(), "--precision") == 0;
  EXPECT_LT(largest_difference(ground_.losses("cpu"), ground_.losses("cuda")),
            is_exact ? 5e-3 : 0.05);
  const bool is_shared = std::stoi(GetParam().at(1)) > gpu_count();
  EXPECT_EQ(result.output.find("ranks share GPU 0") != std::string::npos, is_shared)
      << result.output;
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

TEST_F(TrainOnCuda, ModelsOfOthersStartFromTheSameValuesInEveryLayout) {
  const auto train = [&](const std::string& run, const Words& more) {
    auto words = on_cuda({"--model", "qwen3", "--heads", "4", "--kv-heads", "2"});
    words.insert(words.end(), more.begin(), more.end());
    const auto result = ground_.train(run, words);
    EXPECT_TRUE(result.status.ok()) << result.output;
    return ground_.losses(run);
  };
  const auto one = train("one", {"--ranks", "1"});
  ASSERT_EQ(one.size(), 12);
  EXPECT_LT(largest_difference(train("shards", {"--parallel", "fully_shard"}), one), 5e-3);
  EXPECT_LT(largest_difference(train("parts", {"--mesh", "tp=2"}), one), 5e-3);
  EXPECT_LT(largest_difference(train("program", {"--ranks", "1", "--compile"}), one), 5e-3);
}

TEST_F(TrainOnCuda, WeightsOfAFolderHaveTheLossesOfTheCpu) {
  auto config = small_config(models::Family::Llama, /*is_tied=*/true);
  config.vocab_size = 256;
  models::save_pretrained(small_model(config), ground_.run("published"));
  // Sizes are the folder's: 0 leaves them open.
  const Words from = {"--from",      ground_.run("published"),
                      "--tokenizer", "bytes",
                      "--blocks",    "0",
                      "--width",     "0",
                      "--heads",     "0"};
  const auto train = [&](const std::string& run, Words words) {
    words.insert(words.end(), from.begin(), from.end());
    const auto result = ground_.train(run, words);
    EXPECT_TRUE(result.status.ok()) << result.output;
    return ground_.losses(run);
  };
  const auto cpu = train("cpu", {"--ranks", "1", "--lr", "3e-3"});
  ASSERT_EQ(cpu.size(), 12);
  EXPECT_LT(largest_difference(train("cuda", on_cuda({"--ranks", "1"})), cpu), 5e-3);
  EXPECT_LT(
      largest_difference(
          train("shards", on_cuda({"--parallel", "fully_shard", "--precision", "bf16"})), cpu),
      0.1);
}

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

TEST_F(TrainOnCuda, CompilesByDefaultWhereItPays) {
  const auto result = ground_.train("long", on_cuda({"--ranks", "1", "--steps", "500"}));
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr(", compiled"));
  EXPECT_THAT(result.output, Not(HasSubstr("eager")));
  EXPECT_THAT(ground_.read("long", "program.cpp"), HasSubstr("aten"));
  const auto brief = ground_.train("brief", on_cuda({"--ranks", "1"}));
  EXPECT_THAT(brief.output, HasSubstr("not compiled: compiling takes longer"));
}

TEST_F(TrainOnCuda, CompiledStepsAreOneProgramThatStays) {
  for (const Words& more : {Words{}, Words{"--precision", "bf16"}, Words{"--ranks", "2"}}) {
    auto words = on_cuda({"--steps", "24"});
    if (std::ranges::count(more, "--ranks") == 0) words.insert(words.end(), {"--ranks", "1"});
    words.insert(words.end(), more.begin(), more.end());
    ASSERT_TRUE(ground_.train("eager", words).status.ok());
    words.emplace_back("--compile");
    const auto result = ground_.train("compiled", words);
    ASSERT_TRUE(result.status.ok()) << result.output;
    EXPECT_THAT(result.output, Not(AnyOf(HasSubstr("eagerly"), HasSubstr("dropped"))));
    EXPECT_THAT(ground_.read("compiled", "program.cpp"), HasSubstr("aten"));
    EXPECT_LT(largest_difference(ground_.losses("compiled"), ground_.losses("eager")), 2e-2);
    for (const char* name : {"eager", "compiled"}) fs::remove_all(ground_.run(name));
  }
}

TEST_F(TrainOnCuda, LeavesStepsOutThatAreNotFinite) {
  const auto result =
      ground_.train("run", {"--device", "cuda", "--ranks", "1", "--lr", "1e20", "--clip", "0",
                            "--warmup", "0", "--skip-nonfinite", "--steps", "10"});
  EXPECT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr("step left out"));
  EXPECT_THAT(ground_.read("run", "metrics.jsonl"), HasSubstr("\"nonfinite\""));
}

TEST_F(TrainOnCuda, TrainsInFp16WithAScalerAndGoesOnWithItsScale) {
  const auto words = on_cuda({"--ranks", "2", "--precision", "fp16", "--steps", "40",
                              "--save-every", "32", "--keep-last", "0"});
  const auto result = ground_.train("run", words);
  ASSERT_TRUE(result.status.ok()) << result.output;
  const auto straight = ground_.losses("run");
  ASSERT_EQ(straight.size(), 40);
  EXPECT_LT(straight.at(40), straight.at(1) - 0.3) << "nothing was learned";
  EXPECT_EQ(ground_.read("run", "metrics.jsonl").find("nonfinite"), std::string::npos)
      << "an overflow of the scaled gradient is no failure";

  fs::remove_all(fs::path(ground_.run("run")) / "checkpoints" / "step-00000040");
  fs::remove(fs::path(ground_.run("run")) / "metrics.jsonl");
  const auto resumed =
      ground_.call({TESSERA_TOOL, "train", "--resume", "--run", ground_.run("run")});
  ASSERT_TRUE(resumed.status.ok()) << resumed.output;
  // A scale that began anew would leave steps out until it is small enough.
  EXPECT_LT(largest_difference(ground_.losses("run"), straight), 2e-2);
}

TEST_F(TrainOnCuda, EndsByTimeWithOneLastLine) {
  const auto result = ground_.train("run", on_cuda({"--ranks", "1", "--steps", "100000",
                                                    "--minutes", "0.02", "--log-every", "0"}));
  ASSERT_TRUE(result.status.ok()) << result.output;
  size_t lines = 0;
  for (size_t at = 0; (at = result.output.find("\nstep ", at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, 1) << result.output;
}

/// The first step takes longer than the run may; the second, issued behind it, has weights of 1e20.
TEST_F(TrainOnCuda, SavesTheLastGoodStepIfTheOneBehindTheEndIsNotFinite) {
  const auto result = ground_.train(
      "run", {"--device", "cuda", "--ranks", "1", "--lr", "1e20", "--clip", "0", "--warmup", "0",
              "--steps", "1000", "--minutes", "0.0001", "--validation", "0", "--sample", "0"});
  EXPECT_TRUE(result.status.ok()) << result.output;
  EXPECT_EQ(ground_.checkpoints("run"), std::vector<std::string>{"step-00000001"});
  EXPECT_EQ(ground_.losses("run").size(), 1);
}

/// One of a trace, in microseconds.
struct TracedEvent {
  std::string name, kind;
  int thread;
  double begin, end;
};

std::vector<TracedEvent> events_of(const std::string& trace) {
  std::vector<TracedEvent> events;
  const auto parsed = json::parse(trace);
  for (const auto& event : parsed.at("traceEvents")) {
    if (event["ph"] != "X") continue;
    const double begin = event["ts"], duration = event["dur"];
    events.push_back({.name = event["name"],
                      .kind = event["cat"],
                      .thread = event["tid"],
                      .begin = begin,
                      .end = begin + duration});
  }
  return events;
}

/// Moves what is of a GPU behind what is of the host; where it begins.
auto split_kernels(std::vector<TracedEvent>& events) {
  return std::ranges::stable_partition(events,
                                       [](const auto& event) { return event.kind != "kernel"; })
      .begin();
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
    SCOPED_TRACE(file);
    auto events = events_of(ground_.read("run", file));
    const auto kernels = split_kernels(events);
    ASSERT_NE(kernels, events.begin()) << "no spans of the host";
    ASSERT_NE(kernels, events.end()) << "no kernels; the run said: " << result.output;
    const auto is_of_host = [](const auto& event) { return event.thread == 0; };
    EXPECT_TRUE(std::all_of(events.begin(), kernels, is_of_host));
    EXPECT_TRUE(std::none_of(kernels, events.end(), is_of_host));
    // One clock: no kernel begins before the first span, or ends long after the last.
    constexpr double kSlack = 2000;
    double first = events.front().begin, last = 0;
    for (auto event = events.begin(); event != kernels; ++event) {
      first = std::min(first, event->begin);
      last = std::max(last, event->end);
    }
    EXPECT_TRUE(std::all_of(kernels, events.end(), [&](const auto& kernel) {
      return kernel.begin > first - kSlack && kernel.end < last + kSlack;
    }));
  }

  // In the trace the same: two steps are issued before the device has done one of the three.
  auto events = events_of(ground_.read("run", "trace.json"));
  const auto kernels = split_kernels(events);
  std::vector<double> issued;  // when the host was done with a step
  for (auto event = events.begin(); event != kernels; ++event) {
    if (event->name == "update") issued.push_back(event->end);
  }
  ASSERT_EQ(issued.size(), 3);
  const auto done = std::count_if(kernels, events.end(),
                                  [&](const auto& kernel) { return kernel.end < issued[1]; });
  EXPECT_LT(done, (events.end() - kernels) / 3)
      << "kernels of three steps, done when two are issued";
}

}  // namespace
}  // namespace tessera::testing
