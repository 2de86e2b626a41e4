// The job from start to end, and what it leaves behind.
#include <tessera/corpus.h>

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

TEST(TrainJob, LearnsAndLeavesARunBehind) {
  const TrainingGround ground;
  const auto result = ground.train("run", {"--trace", "1"});
  ASSERT_TRUE(result.status.ok()) << result.output;
  const auto losses = ground.losses("run");
  ASSERT_EQ(losses.size(), 12);
  EXPECT_LT(losses.at(12), losses.at(1) - 1) << result.output;
  EXPECT_EQ(ground.validation_losses("run").size(), 1);
  EXPECT_THAT(result.output, HasSubstr("validation loss"));
  EXPECT_THAT(result.output, HasSubstr("tokens/s"));
  EXPECT_THAT(result.output, HasSubstr("The "));
  EXPECT_EQ(ground.checkpoints("run"),
            (std::vector<std::string>{"step-00000008", "step-00000012"}));
  const auto facts = nlohmann::json::parse(ground.read("run", "run.json"));
  EXPECT_EQ(facts["world_size"], 2);
  EXPECT_EQ(facts["mesh"]["dim_names"], nlohmann::json({"dp"}));
  EXPECT_FALSE(facts["sharding"].empty());
  const auto config = nlohmann::json::parse(ground.read("run", "config.json"));
  EXPECT_EQ(config["blocks"], "2");
  EXPECT_EQ(config["precision"], "fp32");
  for (const auto* file : {"timeline.json", "trace.json"}) {
    const auto events = nlohmann::json::parse(ground.read("run", file))["traceEvents"];
    std::set<int> ranks;
    std::set<std::string> kinds;
    for (const auto& event : events) {
      ranks.insert(event["pid"].get<int>());
      kinds.insert(event.value("cat", ""));
    }
    EXPECT_EQ(ranks.size(), 2) << file;
    for (const auto* kind : {"data", "forward", "backward", "optimizer", "communication"})
      EXPECT_TRUE(kinds.contains(kind)) << file << " lacks " << kind;
    EXPECT_EQ(kinds.contains("operator"), std::string(file) == "trace.json");
  }
}

std::vector<nlohmann::json> validations(const TrainingGround& ground, const std::string& run) {
  std::vector<nlohmann::json> found;
  std::istringstream lines(ground.read(run, "metrics.jsonl"));
  for (std::string text; std::getline(lines, text);) {
    const auto line = nlohmann::json::parse(text);
    if (line.contains("val_loss")) found.push_back(line);
  }
  return found;
}

TEST(TrainJob, ValidatesOnTextsOfTheirOwnInNatsPerByte) {
  const TrainingGround ground;
  const auto other = ground.path() / "other";
  fs::create_directory(other);
  std::string text;
  for (int i = 0; i < 40; ++i)
    text += "text that nobody trains on, line " + std::to_string(i) + "\n";
  std::ofstream(other / "held-out.txt") << text;
  const Words words = {"--validation-data", other, "--steps", "4", "--eval-every", "2"};
  ASSERT_TRUE(ground.train("bytes", words).status.ok());
  for (const auto& line : validations(ground, "bytes"))
    EXPECT_DOUBLE_EQ(line["val_loss"].get<double>(), line["val_nats_per_byte"].get<double>());

  auto with_bpe = words;
  with_bpe.insert(with_bpe.end(),
                  {"--tokenizer", TESSERA_SOURCE_DIR "/tools/train/text/tokenizer.json"});
  const auto result = ground.train("bpe", with_bpe);
  ASSERT_TRUE(result.status.ok()) << result.output;
  const auto lines = validations(ground, "bpe");
  ASSERT_EQ(lines.size(), 2U);  // that of step 4 is that of the end
  const auto tokenizer =
      data::Tokenizer::from_file(TESSERA_SOURCE_DIR "/tools/train/text/tokenizer.json");
  const auto tokens = tokenizer.encode(text);
  const auto counted = (std::ssize(tokens) - 1) / 32 * 32;  // whole sequences of --context
  const auto targets = at::ArrayRef<int64_t>(tokens).slice(1, static_cast<size_t>(counted));
  const auto bytes = static_cast<double>(tokenizer.decode(targets).size());
  for (const auto& line : lines)
    EXPECT_NEAR(line["val_nats_per_byte"].get<double>(),
                line["val_loss"].get<double>() * static_cast<double>(counted) / bytes, 1e-6);

  std::ofstream(other / "held-out.txt") << text << "more\n";
  const auto resumed =
      ground.call({TESSERA_TOOL, "train", "--resume", "--run", ground.run("bpe"), "--steps", "6"});
  EXPECT_EQ(resumed.status.code, 2) << resumed.output;
  EXPECT_THAT(resumed.output, HasSubstr("'--validation-data: held-out.txt' has other content"));
}

TEST(TrainJob, RefusesTextsToValidateOnThatAreTooShortOrNotThere) {
  const TrainingGround ground;
  std::ofstream(ground.path() / "short.txt") << "too short";
  const auto result =
      ground.train("short", {"--validation-data", (ground.path() / "short.txt").string()});
  EXPECT_THAT(result.output, HasSubstr("--validation-data: expected at least 33 tokens (--context "
                                       "32), got 9 in 1 file(s); give more of it"));
  EXPECT_FALSE(result.status.ok());
  const auto missing = ground.train("missing", {"--validation-data", "nowhere"});
  EXPECT_EQ(missing.status.code, 2);
  EXPECT_THAT(missing.output, HasSubstr("--validation-data: expected files and folders, got "
                                        "'nowhere', which is not there"));
}

TEST(TrainJob, WithMuonGoesOnAsIfItHadNeverBeenStopped) {
  const TrainingGround ground;
  for (const char* parallel : {"replicate", "fully_shard"}) {
    SCOPED_TRACE(parallel);
    const std::string name = parallel;
    const Words words = {"--optimizer", "muon", "--parallel", parallel, "--dropout", "0"};
    const auto whole = ground.train(name, words);
    ASSERT_TRUE(whole.status.ok()) << whole.output;
    EXPECT_LT(ground.losses(name).at(12), ground.losses(name).at(1) - 1);
    // The checkpoint of step 8 is all that is left.
    fs::remove_all(ground.path() / name / "checkpoints/step-00000012");
    const auto before = ground.losses(name);
    const auto resumed =
        ground.call({TESSERA_TOOL, "train", "--resume", "--run", ground.run(name)});
    ASSERT_TRUE(resumed.status.ok()) << resumed.output;
    EXPECT_THAT(resumed.output, HasSubstr("goes on after step 8"));
    EXPECT_EQ(ground.losses(name), before);
    const auto other = ground.call({TESSERA_TOOL, "train", "--resume", "--run", ground.run(name),
                                    "--optimizer", "adamw", "--steps", "20"});
    EXPECT_EQ(other.status.code, 2) << other.output;
    EXPECT_THAT(other.output, HasSubstr("optimizer is \"muon\", but --optimizer is \"adamw\""));
  }
}

TEST(TrainJob, CountsAsAPersonWould) {
  const TrainingGround ground;
  const auto one = ground.train("one", {"--steps", "2", "--ranks", "1", "--blocks", "1"});
  EXPECT_THAT(one.output, HasSubstr(" (1 block, width 32), "));
  EXPECT_THAT(one.output, HasSubstr(" tokens of text in 1 file\n"));
  EXPECT_THAT(one.output, HasSubstr("1 rank, "));
  std::ofstream(ground.path() / "text" / "more.txt") << "more";
  const auto two = ground.train("two", {"--steps", "2"});
  EXPECT_THAT(two.output, HasSubstr(" (2 blocks, width 32), "));
  EXPECT_THAT(two.output, HasSubstr(" tokens of text in 2 files\n"));
}

TEST(TrainJob, MetricsTellOfEachStep) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run", {"--steps", "3"}).status.ok());
  std::istringstream lines(ground.read("run", "metrics.jsonl"));
  std::string first;
  std::getline(lines, first);
  const auto line = nlohmann::json::parse(first);
  for (const auto* field : {"step", "loss", "lr", "tokens_per_s", "comm_share", "memory_bytes",
                            "tokens", "grad_norm", "seconds", "epoch", "mfu"})
    EXPECT_TRUE(line.contains(field)) << field;
  EXPECT_GT(line["mfu"], 0);
  EXPECT_EQ(line["tokens"], 4 * 32);
  EXPECT_GE(line["comm_share"], 0);
  EXPECT_LE(line["comm_share"], 1);
}

/// A step is read when the next one is issued, but before anything that is said of it.
TEST(TrainJob, TellsOfAStepBeforeItsValidationAndItsCheckpoint) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run", {"--steps", "9", "--eval-every", "3"}).status.ok());
  std::istringstream lines(ground.read("run", "metrics.jsonl"));
  int steps = 0;
  std::vector<int> validated, saved;
  for (std::string text; std::getline(lines, text);) {
    const auto line = nlohmann::json::parse(text);
    if (line.contains("loss")) {
      EXPECT_EQ(line["step"], ++steps);
    } else if (line.contains("val_loss")) {
      validated.push_back(line["step"]);
      EXPECT_EQ(line["step"], steps);
    } else if (line["event"] == "saved") {
      saved.push_back(line["step"]);
      EXPECT_LE(line["step"], steps);
    }
  }
  EXPECT_EQ(steps, 9);
  EXPECT_EQ(validated, (std::vector<int>{3, 6, 9}));
  EXPECT_EQ(saved, (std::vector<int>{4, 8, 9}));
}

/// Whether anything is read late must not show in what is computed.
TEST(TrainJob, TrainsAlikeHoweverOftenItHalts) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("seldom", {"--save-every", "0"}).status.ok());
  ASSERT_TRUE(ground.train("often", {"--save-every", "1", "--eval-every", "2"}).status.ok());
  EXPECT_EQ(ground.losses("seldom"), ground.losses("often"));
}

TEST(TrainJob, SameSeedSameLosses) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("first", {"--steps", "4"}).status.ok());
  ASSERT_TRUE(ground.train("second", {"--steps", "4"}).status.ok());
  ASSERT_TRUE(ground.train("third", {"--steps", "4", "--seed", "2"}).status.ok());
  EXPECT_EQ(ground.losses("first"), ground.losses("second"));
  EXPECT_NE(ground.losses("first"), ground.losses("third"));
}

/// Settings of the small model that leave the losses as they are, but for rounding.
class TrainLayout : public ::testing::TestWithParam<Words> {};

TEST_P(TrainLayout, TrainsAsOneRankDoes) {
  const TrainingGround ground;
  // With a larger rate the losses of some steps hang on the last bits of all before.
  const Words rate = {"--lr", "3e-3"};
  const auto with_rate = [&](Words words) {
    words.insert(words.end(), rate.begin(), rate.end());
    return words;
  };
  const auto plain = ground.train("plain", with_rate({"--ranks", "1"}));
  ASSERT_TRUE(plain.status.ok()) << plain.output;
  const auto result = ground.train("other", with_rate(GetParam()));
  ASSERT_TRUE(result.status.ok()) << result.output;
  ASSERT_EQ(ground.losses("other").size(), 12);
  // Rounding; with fp16 the first steps are left out, until the scale fits.
  const auto has = [](const char* word) { return std::ranges::count(GetParam(), word) > 0; };
  const double bound = has("fp16") || has("powersgd") ? 0.5 : has("bf16") ? 0.01 : 2e-3;
  EXPECT_LT(largest_difference(ground.losses("plain"), ground.losses("other")), bound);
}

INSTANTIATE_TEST_SUITE_P(
    , TrainLayout,
    ::testing::Values(Words{"--ranks", "2"}, Words{"--ranks", "4"},
                      Words{"--parallel", "fully_shard"},
                      Words{"--ranks", "4", "--parallel", "hybrid", "--mesh", "replicas=2,dp=2"},
                      Words{"--mesh", "tp=2"}, Words{"--ranks", "4", "--mesh", "dp=2,tp=2"},
                      Words{"--ranks", "4", "--mesh", "dp=2,tp=2", "--parallel", "fully_shard"},
                      Words{"--accumulate", "2"}, Words{"--ranks", "1", "--accumulate", "2"},
                      Words{"--mesh", "tp=2", "--accumulate", "2"},
                      Words{"--comm-hook", "powersgd"},
                      Words{"--accumulate", "2", "--parallel", "fully_shard"},
                      Words{"--checkpoint-activations", "block"},
                      Words{"--checkpoint-activations", "selective", "--parallel", "fully_shard"},
                      Words{"--compile"}, Words{"--compile", "--parallel", "fully_shard"},
                      Words{"--compile", "--checkpoint-activations", "block"},
                      Words{"--compile", "--accumulate", "2"}, Words{"--compile", "--mesh", "tp=2"},
                      Words{"--comm-hook", "bf16"}, Words{"--precision", "bf16"},
                      Words{"--precision", "bf16", "--parallel", "fully_shard"},
                      Words{"--precision", "fp16"}, Words{"--precision", "bf16", "--compile"}),
    [](const auto& info) {
      std::string name;
      for (auto word : info.param) {
        for (const char c : word) name += std::isalnum(c) != 0 ? c : '_';
      }
      return name;
    });

TEST(TrainJob, CompiledLeavesItsProgram) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run", {"--compile"}).status.ok());
  EXPECT_THAT(ground.read("run", "program.cpp"), HasSubstr("aten"));
  const auto page = ground.run("page.html");
  const auto drawn =
      ground.call({ground.words("run")[0], "inspect", "--program", ground.run("run"), "-o", page});
  EXPECT_TRUE(drawn.status.ok()) << drawn.output;
  EXPECT_THAT(drawn.output, HasSubstr("run/program.txt, "));
  EXPECT_TRUE(std::filesystem::exists(page));
}

TEST(TrainJob, SaysWhyItIsNotCompiled) {
  const TrainingGround ground;
  const auto open = ground.train("open", {"--steps", "2"});
  EXPECT_THAT(open.output, HasSubstr("runs eagerly, not compiled: steps of a GPT are not measured "
                                     "to be faster so on a CPU; --compile compiles it"));
  const auto told = ground.train("told", {"--steps", "2", "--no-compile"});
  EXPECT_THAT(told.output, Not(HasSubstr("compile")));
}

TEST(TrainJob, SaysWhyACompiledStepFallsBackToEager) {
  const TrainingGround ground;
  const auto result = ground.train("run", {"--compile", "--comm-hook", "powersgd"});
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr(", compiled"));
  EXPECT_THAT(result.output, HasSubstr("\nfalls back to eager, since "));
  EXPECT_THAT(ground.read("run", "metrics.jsonl"), HasSubstr("\"event\":\"eager\""));
}

TEST(TrainJob, ShowsOneLineOnATerminal) {
  const TrainingGround ground;
  auto words = ground.words("run", {"--steps", "3"});
  std::string command;
  for (const auto& word : words) command += "'" + word + "' ";
  const auto result = ground.call({"script", "-qec", command, "/dev/null"});
  if (result.output.find("not found") != std::string::npos) GTEST_SKIP() << "no script(1)";
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr("\033[1A\033[2K"));
  EXPECT_THAT(result.output, HasSubstr("left"));
}

TEST(TrainJob, LeavesOutOfItsLineWhatDoesNotFit) {
  const TrainingGround ground;
  auto words = ground.words("run", {"--steps", "3"});
  words.insert(words.begin(), {"env", "TESSERA_COLUMNS=40"});
  const auto result = ground.call(words);
  ASSERT_TRUE(result.status.ok()) << result.output;
  std::istringstream lines(result.output);
  int shown = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto at = line.find("step ");
    if (at != 0 && !line.starts_with("\033")) continue;
    ++shown;
    EXPECT_THAT(line.substr(at), EndsWith(" left"));
    EXPECT_LT(line.size() - at, 40) << line;
  }
  EXPECT_EQ(shown, 3) << result.output;
}

/// mpirun gives each rank a terminal, and what it collects from them may go into a file.
TEST(TrainJob, ShowsPlainLinesUnderMpirun) {
  const TrainingGround ground;
  std::string command = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 ";
  for (const auto& word : ground.words("run", {"--steps", "3"})) command += "'" + word + "' ";
  const auto result = ground.call({"script", "-qec", command, "/dev/null"});
  if (result.output.find("not found") != std::string::npos) GTEST_SKIP() << "no script(1)";
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr("step 3/3"));
  EXPECT_THAT(result.output, Not(HasSubstr("\033")));
}

TEST(TrainJob, TracesAsManyStepsAsThereAre) {
  const TrainingGround ground;
  const auto count = [&](const std::string& run) {
    int forwards = 0;
    const auto trace = nlohmann::json::parse(ground.read(run, "trace.json"));
    for (const auto& event : trace["traceEvents"])
      forwards += event.value("cat", "") == "forward" && event["pid"] == 0;
    return forwards;
  };
  ASSERT_TRUE(ground.train("six", {"--trace", "3", "--steps", "6"}).status.ok());
  EXPECT_EQ(count("six"), 3);
  EXPECT_NE(ground.read("six", "timeline.json"), "");
  ASSERT_TRUE(ground.train("two", {"--trace", "3", "--steps", "2"}).status.ok());
  EXPECT_EQ(count("two"), 2);
}

TEST(TrainJob, ValidatesAlikeOnAnyNumberOfRanks) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("one", {"--steps", "1", "--warmup", "0", "--ranks", "1"}).status.ok());
  ASSERT_TRUE(ground.train("four", {"--steps", "1", "--warmup", "0", "--ranks", "4"}).status.ok());
  EXPECT_LT(largest_difference(ground.validation_losses("one"), ground.validation_losses("four")),
            1e-4);
}

TEST(TrainJob, MakesAFolderUnderRunsAndLeavesItOutOfTheText) {
  const TrainingGround ground;
  auto words = ground.words("", {"--data", ".", "--steps", "4"});
  words.erase(words.begin() + 2, words.begin() + 4);  // --run
  ASSERT_TRUE(ground.call(words).status.ok());
  const auto report = ground.call({TESSERA_TOOL, "report", "runs", "-o", "report.html"});
  const auto result = ground.call({TESSERA_TOOL, "train", "--resume", "--steps", "6"});
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr("goes on after step 4"));
}

TEST(TrainJob, RunsUnderAnotherLauncher) {
  const TrainingGround ground;
  auto words = ground.words("run", {"--steps", "2"});
  words.insert(words.begin(), {TESSERA_TOOL, "run", "-n", "3", "--"});
  words.insert(words.end(), {"--batch", "3"});
  const auto result = ground.call(words);
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_EQ(nlohmann::json::parse(ground.read("run", "run.json"))["world_size"], 3);
}

TEST(TrainSettings, ComeFromAFileWithTheSameNames) {
  const TrainingGround ground;
  std::ofstream(ground.path() / "train.toml")
      << "steps = 2\nlr = 0.005\nparallel = \"fully_shard\"\n";
  auto words = ground.words("run");
  for (const auto* name : {"--steps", "--lr"}) {
    const auto at = std::ranges::find(words, name);
    words.erase(at, at + 2);
  }
  words.insert(words.end(), {"--config", "train.toml"});
  const auto result = ground.call(words);
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_EQ(ground.losses("run").size(), 2);
  EXPECT_THAT(ground.read("run", "config.toml"), HasSubstr("fully_shard"));
}

}  // namespace
}  // namespace tessera::testing
