// How a job ends: which signal, limit or time has ended it, what it has saved and where.
#include "train/train_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <numbers>
#include <thread>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string last_saved(const TrainingGround& ground, const std::string& run) {
  return "the last saved checkpoint is " + ground.run(run) + "/checkpoints/" +
         ground.checkpoints(run).back() + "; go on with --resume --run " + ground.run(run);
}

std::vector<nlohmann::json> steps_of(const TrainingGround& ground, const std::string& run) {
  std::vector<nlohmann::json> steps;
  std::istringstream lines(ground.read(run, "metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    auto parsed = nlohmann::json::parse(line);
    if (parsed.contains("loss")) steps.push_back(std::move(parsed));
  }
  return steps;
}

/// What a terminal shows in the end of lines of which some rewrite the one above.
Words shown(const std::string& output) {
  Words lines;
  std::istringstream stream(output);
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with("\033[1A") && !lines.empty()) lines.pop_back();
    lines.push_back(line);
  }
  return lines;
}

Words on_a_terminal(Words words) {
  words.insert(words.begin(), {"env", "TESSERA_COLUMNS=80"});
  return words;
}

TEST(TrainEnds, WithWhatIsSaved) {
  const TrainingGround ground;
  const auto result = ground.train("run");
  ASSERT_TRUE(result.status.ok()) << result.output;
  const auto nearby = fs::proximate(TESSERA_TOOL, ground.path()).string();
  const std::string tool = nearby.size() < std::strlen(TESSERA_TOOL) ? nearby : TESSERA_TOOL;
  EXPECT_THAT(result.output,
              HasSubstr("\nsaved in " + ground.run("run") + "/checkpoints/step-00000012\nGPT of "));
  const auto line = result.output.substr(result.output.rfind("\nGPT of ") + 1);
  char nats[32];  // of a byte, which here is a token
  std::snprintf(nats, sizeof nats, ": %.3f nats (", ground.validation_losses("run").at(12));
  EXPECT_THAT(line, HasSubstr(std::string(" M parameters") + nats));
  EXPECT_THAT(line, HasSubstr(" bits) per byte of unseen text after "));
  EXPECT_THAT(line, HasSubstr(" tokens/s on 2 ranks; "));
  EXPECT_THAT(line, EndsWith("look at it: " + tool + " report " + ground.run("run") + "\n"));
}

TEST(TrainNamesTheTool, AsAUserFindsIt) {
  const TrainingGround ground;
  const fs::path tool = TESSERA_TOOL;
  const auto bin = tool.parent_path();
  const auto other = ground.path() / "bin";
  fs::create_directory(other);
  fs::copy_file("/bin/true", other / "tessera");
  const auto named = [&](const fs::path& folder, const std::string& path) {
    const auto result = ground.call({"env", "-C", folder.string(), "PATH=" + path,
                                     (bin / "tessera-train").string(), "--no-such-flag"});
    const auto at = result.output.rfind("; see ");
    return at == std::string::npos ? result.output : result.output.substr(at + 6);
  };
  const std::string rest = " train --help\n";
  EXPECT_EQ(named(bin.parent_path(), "/usr/bin"), bin.filename().string() + "/tessera" + rest);
  EXPECT_EQ(named(bin, "/usr/bin"), "./tessera" + rest);
  EXPECT_EQ(named("/", "/nowhere:" + bin.string() + ":" + other.string()), "tessera" + rest);
  EXPECT_EQ(named(bin, other.string() + ":" + bin.string()), "./tessera" + rest);
}

TEST(TrainEnds, OnATerminalWithItsLastWords) {
  const TrainingGround ground;
  const auto result = ground.call(on_a_terminal(ground.words("run")));
  ASSERT_TRUE(result.status.ok()) << result.output;
  const auto lines = shown(result.output);
  EXPECT_THAT(lines.back(), StartsWith("GPT of "));
  EXPECT_THAT(lines, Contains(HasSubstr("step 12/12")).Times(1)) << result.output;
}

TEST(TrainEnds, OnATerminalByCtrlCWithTheWordsOfTheLauncher) {
  const TrainingGround ground;
  Subprocess job({.arguments = on_a_terminal(ground.words("run", {"--steps", "100000"})),
                  .environment = {{"OMP_NUM_THREADS", "1"}},
                  .output = ground.path() / "run.log",
                  .folder = ground.path()});
  ground.await_step("run", 5);
  job.signal(SIGINT);
  EXPECT_EQ(end_of(job).code, 128 + SIGINT) << job.output();
  const auto lines = shown(job.output());
  EXPECT_THAT(lines.back(), AllOf(StartsWith("stopped by SIGINT after step "),
                                  EndsWith(last_saved(ground, "run"))));
  EXPECT_THAT(lines, Contains(HasSubstr("SIGINT: passed on to all ranks"))) << job.output();
}

/// A request is read a step after it came; all that was issued by then is done, told and saved.
TEST(TrainEnds, BySignalWithNoStepUntold) {
  const TrainingGround ground;
  auto job = ground.start("run", {"--steps", "100000", "--save-every", "0"});
  ground.await_step("run", 5);
  job.signal(SIGTERM);
  EXPECT_EQ(end_of(job).code, 128 + SIGTERM) << job.output();
  const auto steps = steps_of(ground, "run");
  for (size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i]["step"], i + 1);
  char name[32];
  std::snprintf(name, sizeof name, "step-%08d", steps.back()["step"].get<int>());
  EXPECT_EQ(ground.checkpoints("run"), Words{name});
}

TEST(TrainEnds, WhenTheTerminalIsClosed) {
  const TrainingGround ground;
  auto job = ground.start("run", {"--steps", "100000", "--save-every", "0"});
  ground.await_step("run", 5);
  job.signal(SIGHUP);
  EXPECT_EQ(end_of(job).code, 128 + SIGHUP) << job.output();
  EXPECT_THAT(job.output(), AllOf(HasSubstr("stopped by SIGHUP after step "),
                                  HasSubstr(last_saved(ground, "run"))));
}

TEST(TrainEnds, UnderNohupNotWithTheTerminal) {
  const TrainingGround ground;
  Words words = {"sh", "-c", "trap '' HUP; exec \"$@\"", "sh"};
  for (const auto& word : ground.words("run", {"--steps", "40"})) words.push_back(word);
  Subprocess job({.arguments = words, .output = ground.path() / "log", .folder = ground.path()});
  ground.await_step("run", 5);
  job.signal(SIGHUP);
  for (const pid_t rank : ranks_of(job.pid())) kill(rank, SIGHUP);
  EXPECT_EQ(end_of(job).code, 0) << job.output();
}

/// A signal to one rank ends the job as one to all, is not a failure, and is told with its sender.
TEST(TrainEnds, BySignalToOneRankWhichIsNamed) {
  const TrainingGround ground;
  auto job = ground.start("run", {"--steps", "100000", "--ranks", "4", "--max-restarts", "2"});
  ground.await_step("run", 5);
  const auto ranks = ranks_of(job.pid());
  ASSERT_EQ(ranks.size(), 4) << job.output();
  kill(ranks[3], SIGTERM);
  EXPECT_EQ(end_of(job).code, 128 + SIGTERM) << job.output();
  EXPECT_THAT(job.output(),
              AllOf(HasSubstr("stopped by SIGTERM, which process " + std::to_string(getpid()) +
                              " sent to rank 3, after step "),
                    HasSubstr(last_saved(ground, "run")), Not(HasSubstr("failed")),
                    Not(HasSubstr("restart 1"))));
}

TEST(TrainEnds, BySignalToOneRankUnderAnotherLauncherWhichNamesIt) {
  const TrainingGround ground;
  Words words = {TESSERA_TOOL, "run", "-n", "4", "--"};
  for (const auto& word : ground.words("run", {"--steps", "100000"})) words.push_back(word);
  Subprocess job({.arguments = words,
                  .environment = {{"OMP_NUM_THREADS", "1"}},
                  .output = ground.path() / "log",
                  .folder = ground.path()});
  ground.await_step("run", 5);
  const auto ranks = ranks_of(job.pid());
  ASSERT_EQ(ranks.size(), 4) << job.output();
  kill(ranks[3], SIGTERM);
  EXPECT_EQ(end_of(job).code, 128 + SIGTERM) << job.output();
  EXPECT_THAT(job.output(), HasSubstr("rank 3 of 4 failed with exit code 143"));
}

/// The disk of the checkpoints has room for one. A signal asks for a second: the job must not end
/// as if it were there.
TEST(TrainEnds, BySignalWithAFullDiskUnsaved) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run", {"--steps", "4"}).status.ok());
  const auto run = ground.run("run");
  const auto disk = run + "/checkpoints";
  int64_t bytes = 0;
  for (const auto& file : fs::recursive_directory_iterator(disk))
    bytes += file.is_regular_file() ? static_cast<int64_t>(file.file_size()) : 0;
  const std::string script =
      "cp -r " + disk + " kept && mount -t tmpfs -o size=" + std::to_string(bytes * 3 / 2) +
      " tessera " + disk + " || exit 77; cp -r kept/. " + disk +
      "; \"$@\" & until grep -q '\"step\":9,' " + run +
      "/metrics.jsonl; do sleep 0.05; done; kill -TERM $!; wait $!; code=$?; ls " + disk +
      "; exit $code";
  Words words = {"unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"};
  for (const auto& word :
       ground.words("run", {"--steps", "100000", "--save-every", "0", "--resume"}))
    words.push_back(word);
  const auto result = ground.call(words);
  if (result.status.code == 77 || result.output.find("unshare: ") != std::string::npos)
    GTEST_SKIP() << "no file systems can be mounted here: " << result.output;
  EXPECT_EQ(result.status.code, 4) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("nothing was saved: "), HasSubstr("No space left on device"),
            HasSubstr("the last saved checkpoint is " + disk + "/step-00000004; go on with"),
            Not(HasSubstr("stopped by SIGTERM after"))));
  EXPECT_THAT(result.output, EndsWith("step-00000004\n"));
}

TEST(TrainEnds, AtTheLimitOnFileSizesWithTheFileAndTheLimit) {
  const TrainingGround ground;
  Words words = {"prlimit", "--fsize=80000000"};  // shared memory needs 64 MiB
  for (const auto& word : ground.words("run", {"--ranks", "1", "--width", "640", "--batch", "1",
                                               "--steps", "1", "--warmup", "0"}))
    words.push_back(word);
  const auto result = ground.call(words);
  if (result.status.code == 127) GTEST_SKIP() << "no prlimit(1)";
  EXPECT_EQ(result.status.code, 4) << result.output;
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("rank-00000-of-00001.safetensors: could not write to it: File too "
                              "large (ulimit -f"),
                    HasSubstr("nothing is saved in " + ground.run("run"))));
  words[1] = "--fsize=4000000";
  std::ranges::replace(words, ground.run("run"), ground.run("other"));
  const auto less = ground.call(words);
  EXPECT_NE(less.status.code, 128 + SIGXFSZ) << less.output;
  EXPECT_THAT(less.output, HasSubstr("ulimit -f"));
}

TEST(TrainEnds, WhenARankDoesNotAnswerWithinItsTimeout) {
  const TrainingGround ground;
  auto job = ground.start("run", {"--steps", "100000", "--timeout", "2"});
  ground.await_step("run", 9);  // the checkpoint of step 4 is there
  const auto ranks = ranks_of(job.pid());
  ASSERT_EQ(ranks.size(), 2) << job.output();
  kill(ranks[1], SIGSTOP);
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (job.output().find("the last saved checkpoint is") == std::string::npos &&
         std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(20ms);
  kill(ranks[1], SIGKILL);
  EXPECT_NE(end_of(job).code, 0);
  EXPECT_THAT(job.output(), AllOf(HasSubstr("timed out"), HasSubstr("rank 1"),
                                  HasSubstr("the last saved checkpoint is")));
}

TEST(TrainByTime, EndsInTimeWithItsScheduleDone) {
  const TrainingGround ground;
  const Words words = {"--steps", "1000000", "--warmup", "20", "--minutes", "0.1"};
  auto job = ground.start("run", words);
  ground.await_step("run", 5);
  job.signal(SIGTERM);
  ASSERT_EQ(end_of(job).code, 128 + SIGTERM) << job.output();
  const auto before = steps_of(ground, "run").size();
  const auto resumed = ground.call({TESSERA_TOOL, "train", "--resume", "--run", ground.run("run")});
  ASSERT_TRUE(resumed.status.ok()) << resumed.output;
  const auto steps = steps_of(ground, "run");
  EXPECT_THAT(resumed.output,
              HasSubstr("\nstopped after 0.1 minutes, as --minutes asks, at step " +
                        std::to_string(steps.size()) + " of 1000000; go on with --resume --run " +
                        ground.run("run") + " --minutes MORE\nsaved in "));
  ASSERT_GT(steps.size(), before);
  EXPECT_GT(steps[before]["elapsed"], steps[before - 1]["elapsed"]);
  EXPECT_GE(steps.back()["elapsed"], 6.0);
  EXPECT_LT(steps[steps.size() - 3]["elapsed"], 6.0);  // the one between is read when it is over
  // The rate of a step is that of the time when the second before it had ended: the one between is
  // not read yet when the step is issued.
  for (size_t i = 1; i < steps.size(); ++i) {
    if (i == before) continue;  // elapsed is that of the checkpoint, which is the line before
    const double elapsed = i < 2 ? 0 : steps[i - 2]["elapsed"].get<double>();
    const double place = std::max<double>(static_cast<double>(i), elapsed / 6 * 1e6);
    const double expected =
        place < 20 ? 1e-2 * (place + 1) / 20
                   : 1e-4 + (1e-2 - 1e-4) *
                                (1 + std::cos(std::numbers::pi * (place - 20) / (1e6 - 20))) / 2;
    EXPECT_NEAR(steps[i]["lr"].get<double>(), expected, 1e-12) << i;
  }
  const auto again = ground.call({TESSERA_TOOL, "train", "--resume", "--run", ground.run("run")});
  EXPECT_TRUE(again.status.ok());
  EXPECT_THAT(again.output, AllOf(HasSubstr(", and its --minutes have passed; "),
                                  EndsWith(last_saved(ground, "run") + " --minutes MORE\n")));
}

/// Of flags that are given twice the later one counts.
TEST(TrainByTime, OfMakeIsThatOfTheUserIfThereIsOne) {
  if (run_program({.arguments = {"make", "--version"}}).status.code == 127)
    GTEST_SKIP() << "no make(1)";
  for (const std::string words : {"--steps 50", "--minutes 6", "--resume"}) {
    const auto result =
        run_program({.arguments = {"make", "--no-print-directory", "-n", "train", "ARGS=" + words},
                     .environment = {{"MAKEFLAGS", std::nullopt}},
                     .folder = TESSERA_SOURCE_DIR});
    EXPECT_THAT(result.output, HasSubstr("flags=$(scripts/train_flags.sh " + words + ") && "));
    EXPECT_THAT(result.output, EndsWith("/tessera train $flags " + words + "\n"));
  }
}

TEST(TrainByTime, IsByStepsWhereThoseEndFirst) {
  const TrainingGround ground;
  const auto timed = ground.train("timed", {"--minutes", "1000"});
  ASSERT_TRUE(timed.status.ok()) << timed.output;
  EXPECT_THAT(timed.output, Not(HasSubstr("stopped after")));
  ASSERT_TRUE(ground.train("plain").status.ok());
  EXPECT_EQ(ground.losses("timed"), ground.losses("plain"));
}

}  // namespace
}  // namespace tessera::testing
