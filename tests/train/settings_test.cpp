// Flags and TOML files, without ranks.
#include "train/settings.h"

#include "support/random.h"
#include "support/temporary_folder.h"
#include "train/settings_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <optional>
#include <random>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using train::Settings;
using Words = std::vector<std::string>;

/// A command line of its own, with its settings.
struct Line {
  CLI::App app;
  Settings settings;
  train::Fields fields = train::add_settings(app, settings);

  Line() = default;
  explicit Line(const Words& words) { parse_settings(app, fields, settings, words); }
};

class TrainSettings : public ::testing::Test {
 protected:
  std::string write(const std::string& text) const {
    const auto file = folder_.path() / "train.toml";
    std::ofstream(file, std::ios::binary) << text;
    return file.string();
  }
  /// What is said of a file; empty if it is taken.
  std::string refusal(const std::string& text, Words words = {}) const {
    words.insert(words.end(), {"--config", write(text)});
    return refusal(words);
  }
  static std::string refusal(const Words& words) {
    try {
      const Line line(words);
      return {};
    } catch (const CLI::ParseError& error) {
      return error.what();
    }
  }

 private:
  TemporaryFolder folder_;
};

/// What breaks readers of quotes, comments and escapes, and texts of several bytes a letter.
std::string hostile_text(std::mt19937_64& random) {
  static const Words pieces = {"#",  "'",  "\"", "'''",  "\"\"\"", "\n", "\r\n", "\\",   "\\n",
                               "\t", " ",  "=",  "[",    "]",      "{",  "}",    ",",    "a",
                               "é",  "日", "🙂", "\x7f", "\x01",   "%",  "-",    "\\u12"};
  std::string text;
  for (auto length = random() % 8; length > 0; --length) text += pieces[random() % pieces.size()];
  return text;
}

/// Settings drawn from a seed, to a file and back.
void expect_to_come_back(uint64_t seed,
                         const std::function<std::string(const std::string&)>& write) {
  SCOPED_TRACE("TESSERA_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> share(0, 0.9);
  for (int i = 0; i < 300; ++i) {
    Line written;
    auto& settings = written.settings;
    settings.prompt = hostile_text(random);
    settings.tokenizer = hostile_text(random);
    settings.data.clear();
    for (auto count = 1 + random() % 3; count > 0; --count)
      settings.data.push_back(hostile_text(random));
    settings.validation = share(random);
    settings.lr = share(random);
    settings.min_lr = settings.lr * share(random);
    settings.seed = random() % (1 << 30);
    const auto drawn = random() % 3;
    settings.compile = drawn == 0 ? std::nullopt : std::optional(drawn == 1);
    settings.mesh = "dp=2,tp=2";
    const auto text = to_toml(written.fields);
    const Line read(Words{"--config", write(text)});
    ASSERT_EQ(read.settings.prompt, settings.prompt) << text;
    ASSERT_EQ(read.settings.tokenizer, settings.tokenizer) << text;
    ASSERT_EQ(read.settings.data, settings.data) << text;
    ASSERT_EQ(to_toml(read.fields), text);
    ASSERT_EQ(to_map(read.fields), to_map(written.fields)) << text;
  }
}

TEST_F(TrainSettings, ComeBackFromAFileAsTheyWere) {
  const auto file = [this](const std::string& text) { return write(text); };
  constexpr uint64_t kFailedOnce = 4238539005;  // a number that was rounded twice
  for (const uint64_t seed : {test_seed(), kFailedOnce}) expect_to_come_back(seed, file);
}

TEST_F(TrainSettings, NumbersAreReadExactly) {
  // To a long double the first is halfway between two doubles.
  const std::pair<const char*, double> cases[] = {{"0.2622361636986347", 0.2622361636986347},
                                                  {"0.26223616369863467", 0.26223616369863467}};
  for (const auto& [text, value] : cases) {
    EXPECT_EQ(Line(Words{"--lr", text}).settings.lr, value);
    EXPECT_EQ(Line(Words{"--config", write("lr = " + std::string(text))}).settings.lr, value);
  }
  EXPECT_EQ(Line(Words{"--lr", "5e-324", "--min-lr", "0"}).settings.lr, 5e-324);
  EXPECT_EQ(Line(Words{"--steps", "010"}).settings.steps, 10) << "not as in C";
  EXPECT_THAT(refusal(Words{"--steps", "99999999999999999999"}),
              HasSubstr("--steps: expected a number from 1 to 1073741824, got '9999"));
  EXPECT_THAT(refusal(Words{"--steps", "0x10"}), HasSubstr("expected a number from 1 to"));
}

TEST_F(TrainSettings, FlagsWinOverTheFileAndTheFileOverDefaults) {
  const auto file = write(
      "data = ['a', 'b'] # two\nsteps = 30\nlr = 1\ncompile = true\nskip-nonfinite = true\n"
      "parallel = \"fully_shard\"\n");
  const Line line(Words{"--config", file, "--steps", "40", "--no-compile"});
  EXPECT_EQ(line.settings.steps, 40);
  EXPECT_EQ(line.settings.compile, false);
  EXPECT_TRUE(line.settings.skip_nonfinite);
  EXPECT_EQ(line.settings.lr, 1);
  EXPECT_EQ(line.settings.data, (Words{"a", "b"}));
  EXPECT_EQ(line.settings.parallel, "fully_shard");
  EXPECT_EQ(line.settings.width, Settings{}.width);
  EXPECT_EQ(Line(Words{"--config", file, "--data", "c"}).settings.data, Words{"c"});
}

TEST_F(TrainSettings, SayWhetherTheStepIsCompiled) {
  const auto choice = [](Words words, int ranks = 1) {
    return train::choose_compile(Line(words).settings, ranks);
  };
  const auto on_cuda = [&](Words words, int ranks = 1) {
    words.insert(words.begin(), {"--device", "cuda"});
    return choice(words, ranks);
  };
  EXPECT_TRUE(on_cuda({}).is_on);
  EXPECT_TRUE(on_cuda({"--precision", "bf16"}).is_on);
  EXPECT_EQ(on_cuda({}).why_not, "");
  const std::pair<Words, const char*> left_out[] = {
      {{"--steps", "499"}, "compiling takes longer than fewer than 500 steps save"},
      {{"--precision", "fp16"}, "fp16"},
      {{"--dropout", "0.1"}, "--dropout"},
      {{"--mesh", "pp=1"}, "pp or cp in --mesh"},
      {{"--mesh", "dp=1,cp=1"}, "pp or cp in --mesh"},
      {{"--accumulate", "2"}, "--accumulate"},
      {{"--checkpoint-activations", "block"}, "--checkpoint-activations"}};
  for (const auto& [words, why] : left_out) {
    EXPECT_FALSE(on_cuda(words).is_on) << why;
    EXPECT_THAT(on_cuda(words).why_not, HasSubstr(why));
    auto told = words;
    told.emplace_back("--compile");
    EXPECT_TRUE(on_cuda(told).is_on) << why;
    EXPECT_EQ(on_cuda(told).why_not, "");
  }
  EXPECT_FALSE(choice({}).is_on);
  EXPECT_THAT(choice({}).why_not, HasSubstr("on a CPU"));
  EXPECT_THAT(on_cuda({}, 2).why_not, HasSubstr("several ranks"));
  EXPECT_FALSE(on_cuda({"--no-compile"}).is_on);
  EXPECT_EQ(on_cuda({"--no-compile"}).why_not, "") << "as it was told";
}

TEST_F(TrainSettings, WithoutAWordLeaveCompilingOpen) {
  EXPECT_EQ(Line().settings.compile, std::nullopt);
  EXPECT_EQ(Line(Words{"--compile"}).settings.compile, true);
  EXPECT_EQ(Line(Words{"--no-compile"}).settings.compile, false);
  EXPECT_EQ(Line(Words{"--config", write("compile = \"auto\"")}).settings.compile, std::nullopt);
  EXPECT_EQ(Line(Words{"--config", write("compile = \"auto\""), "--compile"}).settings.compile,
            true);
  EXPECT_THAT(to_toml(Line().fields), HasSubstr("compile = \"auto\""));
  EXPECT_EQ(to_map(Line().fields).at("compile"), "auto");
}

TEST_F(TrainSettings, OfARunLeaveItsFolderOut) {
  const Line line(Words{"--run", "runs/one"});
  EXPECT_THAT(to_toml(line.fields), Not(HasSubstr("run =")));
  EXPECT_THAT(to_toml(line.fields), Not(HasSubstr("resume")));
  EXPECT_THAT(to_toml(line.fields), HasSubstr("max-restarts = 0\n"));
  EXPECT_THAT(to_toml(line.fields), HasSubstr("timeout = 300.0\n"));
  EXPECT_THAT(to_toml(line.fields), HasSubstr("minutes = 0.0\n"));
}

TEST_F(TrainSettings, OfAFileAreRefusedByLineAndKey) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"\nstpes = 3", "train.toml:2: expected names of flags, got 'stpes'; did you mean steps?"},
      {"steps = 3\nsteps = 4", "train.toml:2: expected TOML: "},
      {"steps = [3, 4]", "train.toml:1: steps: expected an integer, got an array"},
      {"steps = 3.5", "steps: expected an integer, got a float"},
      {"compile = \"yes\"", "compile: expected true, false or \"auto\", got a string"},
      {"compile = 1", "compile: expected true, false or \"auto\", got an integer"},
      {"prompt = 3", "prompt: expected a string, got an integer"},
      {"data = [1]", "data: expected a string or an array of strings, got an array"},
      {"lr = \"0.1\"", "lr: expected a number, got a string"},
      {"lr = nan", "train.toml:1: --lr: expected a number from 0 to 1e+30, got 'nan'"},
      {"lr = 1979-05-27", "lr: expected a number, got a date or time"},
      {"steps = 0", "train.toml:1: --steps: expected a number from 1 to "},
      {"parallel = \"fully_shart\"", "did you mean fully_shard?"},
      {"[model]\nblocks = 2",
       "train.toml:1: expected names of flags at the top level, got a table [model]"},
      {"[[model]]\nblocks = 2", "at the top level, got a table [model]"},
      {"model.blocks = 2", "at the top level, got a table [model]"},
      {"resume = true", "got 'resume', which is for the command line alone"},
      {"prompt = \"open", "train.toml:1: expected TOML: "}};
  for (const auto& [text, message] : cases) EXPECT_THAT(refusal(text), HasSubstr(message)) << text;
  EXPECT_THAT(refusal(Words{"--config", "/nowhere.toml"}),
              HasSubstr("got '/nowhere.toml': No such file or directory"));
  EXPECT_THAT(refusal(Words{"--config", "/tmp"}), HasSubstr("got the folder '/tmp'"));
}

TEST_F(TrainSettings, ThatATomlFileCannotHoldAreRefused) {
  EXPECT_THAT(refusal(Words{"--prompt", "\xff"}), HasSubstr("--prompt: expected text in UTF-8"));
  EXPECT_EQ(refusal(Words{"--prompt", "日本"}), "");
}

TEST_F(TrainSettings, NumbersHaveToBeFinite) {
  for (const auto* word : {"nan", "inf", "-inf"}) {
    const auto said = refusal(Words{std::string("--lr=") + word});
    EXPECT_THAT(said, HasSubstr("expected a number from 0 to 1e+30, got '" + std::string(word)));
    EXPECT_THAT(said, Not(HasSubstr("nearest")));
  }
  EXPECT_THAT(refusal(Words{"--lr=-1"}), HasSubstr("the nearest is 0"));
}

TEST_F(TrainSettings, TheScheduleFitsTheSteps) {
  EXPECT_EQ(Line().settings.warmup, 40);
  EXPECT_EQ(Line(Words{"--steps", "20"}).settings.warmup, 2);
  EXPECT_EQ(Line(Words{"--steps", "5000"}).settings.warmup, 40);
  EXPECT_EQ(Line(Words{"--steps", "20", "--warmup", "20"}).settings.warmup, 20);
  EXPECT_EQ(Line(Words{"--lr", "1e-5"}).settings.min_lr, 1e-5);
  EXPECT_THAT(refusal(Words{"--steps", "20", "--warmup", "21"}),
              HasSubstr("--warmup: expected at most --steps 20, got 21"));
  EXPECT_THAT(refusal("warmup = 30\n", {"--steps", "20"}),
              HasSubstr("--warmup: expected at most --steps 20, got 30"));
  EXPECT_THAT(refusal(Words{"--lr", "0.001", "--min-lr", "0.01"}),
              HasSubstr("--min-lr: expected at most --lr 0.001, got 0.01"));
}

TEST_F(TrainSettings, TakeTheMemoryOfTheHostIntoAccount) {
  const auto refused = [](const Words& words, int ranks) {
    try {
      check_memory(Line(words).settings, ranks, ranks);
      return std::string();
    } catch (const CLI::ParseError& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(refused({}, 2), "");
  EXPECT_THAT(refused({"--batch", "1073741824"}, 2), HasSubstr("on 2 ranks; lower --batch"));
  EXPECT_EQ(refused({"--batch", "1073741824", "--accumulate", "268435456"}, 2), "");
  EXPECT_THAT(refused({"--width", "16777216", "--blocks", "65536"}, 1),
              HasSubstr("expected a model that fits"));
  // What more ranks share takes no more: twice as many ranks with half of it each.
  const auto with_blocks = [&](int64_t blocks, const Words& layout, int ranks) {
    Words words = {"--width", "1024", "--batch", "4", "--blocks", std::to_string(blocks)};
    words.insert(words.end(), layout.begin(), layout.end());
    return refused(words, ranks);
  };
  const auto fewest_refused = [&](const Words& layout, int ranks) {
    int64_t fits = 1, fewest = 65536;
    while (fewest - fits > 1) {
      const auto middle = (fits + fewest) / 2;
      (with_blocks(middle, layout, ranks).empty() ? fits : fewest) = middle;
    }
    return fewest;
  };
  const auto two = fewest_refused({}, 2), four = fewest_refused({}, 4);
  const Words stages = {"--mesh", "pp=4"};
  const Words shards = {"--mesh", "dp=2,cp=2", "--parallel", "fully_shard"};
  EXPECT_EQ(with_blocks(four + 1, stages, 4), "") << "of the model a quarter each";
  EXPECT_EQ(with_blocks(two + 1, shards, 4), "") << "cp shards, too";
  EXPECT_THAT(with_blocks(5 * four, stages, 4), HasSubstr("expected a model that fits"));
  EXPECT_THAT(with_blocks(3 * two, shards, 4), HasSubstr("expected a model that fits"));
  const auto adapters = fewest_refused({"--lora", "8"}, 1);
  EXPECT_EQ(with_blocks(adapters - 1, {"--lora", "8"}, 1), "");
  EXPECT_THAT(with_blocks(adapters - 1, {"--lora", "8", "--ema", "0.9"}, 1),
              HasSubstr("expected a model that fits"))
      << "frozen weights have averages, too";
}

}  // namespace
}  // namespace tessera::testing
