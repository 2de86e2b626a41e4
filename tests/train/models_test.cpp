// Models of every kind, from published sizes and weights, and back into Hugging Face's folders.
#include <tessera/models.h>
#include <tessera/serialize.h>

#include "data/tokenizer_json.h"
#include "models/small_models.h"
#include "support/peer.h"
#include "train/train_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using models::CausalLM;
using models::Family;
using ::testing::HasSubstr;

constexpr double kRounding = 2e-4;  // of losses, after steps with the sums of other layouts

Words operator+(Words left, const Words& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

/// Small models of every family that have a row for every byte.
models::DecoderConfig byte_config(Family family, bool is_tied) {
  auto config = small_config(family, is_tied);
  config.vocab_size = 256;
  return config;
}

class TrainModel : public ::testing::TestWithParam<const char*> {
 protected:
  Words of_family(Words words = {}) const {
    Words all = Words{"--model", GetParam(), "--heads", "4", "--lr", "3e-3"} + words;
    if (GetParam() != std::string("gpt2")) all = all + Words{"--kv-heads", "2"};
    return all;
  }

  TrainingGround ground_;
};

TEST_P(TrainModel, HasTheLossesOfOneRankInEveryLayout) {
  const auto one = ground_.train("one", of_family({"--ranks", "1"}));
  ASSERT_TRUE(one.status.ok()) << one.output;
  EXPECT_THAT(one.output, HasSubstr(std::string(GetParam()) + " of 0.0"));
  const auto losses = ground_.losses("one");
  ASSERT_EQ(losses.size(), 12);
  EXPECT_LT(losses.at(12), losses.at(1) - 0.3);
  const std::vector<Words> layouts = {
      {"--parallel", "fully_shard"}, {"--mesh", "tp=2"}, {"--checkpoint-activations", "block"}};
  for (const auto& layout : layouts) {
    const auto result = ground_.train(layout.back(), of_family(layout));
    ASSERT_TRUE(result.status.ok()) << result.output;
    ASSERT_EQ(ground_.losses(layout.back()).size(), 12);
    EXPECT_LT(largest_difference(ground_.losses(layout.back()), losses), kRounding)
        << layout.back();
  }
}

INSTANTIATE_TEST_SUITE_P(Families, TrainModel, ::testing::Values("gpt2", "llama", "qwen2", "qwen3"),
                         [](const auto& chosen) { return std::string(chosen.param); });

class TrainPublished : public ::testing::Test {
 protected:
  /// A Hugging Face folder without a tokenizer.
  std::string publish(const models::DecoderConfig& config) const {
    auto net = small_model(config);
    auto path = ground_.run("published");
    models::save_pretrained(net, path);
    return path;
  }
  static Words from(const std::string& folder, const Words& further = {}) {
    return Words{"--from", folder, "--tokenizer", "bytes"} + further;
  }
  /// Without sizes but those that are given.
  ProgramResult train(const std::string& run, const Words& further) const {
    Words words;
    const auto all = ground_.words(run, further);
    for (size_t i = 0; i < all.size(); ++i) {
      const bool is_size = all[i] == "--blocks" || all[i] == "--width" || all[i] == "--heads";
      if (is_size && std::ranges::count(further, all[i]) == 0)
        ++i;
      else
        words.push_back(all[i]);
    }
    return ground_.call(words);
  }
  ProgramResult export_run(const std::string& run, const std::string& to,
                           const Words& further = {}) const {
    return ground_.call(Words{TESSERA_TOOL, "export", run, to} + further);
  }

  TrainingGround ground_;
};

TEST_F(TrainPublished, TokenShardsThatWereMovedAreMissedByExport) {
  data::testing::TokenizerJson json;
  for (char left = 'a'; left < 'q'; ++left) {
    for (char right = 'a'; right < 'q'; ++right)
      json.merges.emplace_back(std::string(1, left), std::string(1, right));
  }
  json.write(ground_.path() / "pairs.json");
  const auto tokens = ground_.run("tokens");
  const auto written =
      ground_.call({TESSERA_TOOL, "tokenize", tokens, "--data", ground_.run("text"), "--tokenizer",
                    ground_.run("pairs.json")});
  ASSERT_TRUE(written.status.ok()) << written.output;
  const auto trained = ground_.train(
      "run", {"--data", tokens, "--vocabulary", "512", "--steps", "4", "--ranks", "1"});
  ASSERT_TRUE(trained.status.ok()) << trained.output;
  const auto exported = export_run(ground_.run("run"), ground_.run("model"));
  EXPECT_TRUE(exported.status.ok()) << exported.output;
  fs::rename(tokens, ground_.run("elsewhere"));
  const auto refused = export_run(ground_.run("run"), ground_.run("other"));
  EXPECT_EQ(refused.status.code, 1) << refused.output;
  EXPECT_THAT(refused.output, HasSubstr("was trained with, tokenizer.json#"));
  EXPECT_THAT(refused.output, HasSubstr("got bytes"));
  EXPECT_THAT(refused.output, HasSubstr(tokens));
  EXPECT_FALSE(fs::exists(ground_.run("other")));
}

TEST_F(TrainPublished, WeightsOfAFolderAreTrainedOnAndExported) {
  for (const auto family : {Family::GPT2, Family::Qwen3}) {
    const std::string name = models::name_of(family);
    SCOPED_TRACE(name);
    const auto folder = publish(byte_config(family, /*is_tied=*/true));
    // A rate that changes nothing: the losses are those of the folder's model.
    const Words still = {"--lr", "1e-30", "--weight-decay", "0", "--steps", "2"};
    const auto plain = train(name + "-plain", from(folder, still + Words{"--ranks", "1"}));
    ASSERT_TRUE(plain.status.ok()) << plain.output;
    const auto sharded =
        train(name + "-sharded", from(folder, still + Words{"--parallel", "fully_shard"}));
    ASSERT_TRUE(sharded.status.ok()) << sharded.output;
    EXPECT_LT(
        largest_difference(ground_.losses(name + "-plain"), ground_.losses(name + "-sharded")),
        kRounding);
    const auto exported = ground_.run(name + "-exported");
    const auto result = export_run(ground_.run(name + "-sharded"), exported);
    ASSERT_TRUE(result.status.ok()) << result.output;
    expect_same_files(exported, folder);
    fs::remove_all(folder);
  }
}

TEST_F(TrainPublished, ARunGoesOnWithoutReadingTheWeightsAgain) {
  const auto folder = publish(byte_config(Family::Qwen2, /*is_tied=*/false));
  const Words words = from(folder, {"--lr", "1e-3", "--parallel", "fully_shard"});
  ASSERT_TRUE(train("run", words).status.ok());
  const auto straight = ground_.losses("run");
  ASSERT_EQ(straight.size(), 12);
  fs::remove_all(fs::path(ground_.run("run")) / "checkpoints" / "step-00000012");
  fs::remove(fs::path(ground_.run("run")) / "metrics.jsonl");
  fs::remove(fs::path(folder) / "model.safetensors");
  const auto resumed =
      ground_.call({TESSERA_TOOL, "train", "--resume", "--run", ground_.run("run")});
  ASSERT_TRUE(resumed.status.ok()) << resumed.output;
  const auto losses = ground_.losses("run");
  ASSERT_EQ(losses.size(), 4);
  EXPECT_EQ(largest_difference(losses, straight), 0);
}

TEST_F(TrainPublished, PresetsGiveSizesThatFlagsChange) {
  const auto small = train("small", {"--preset", "qwen3-0.6b", "--blocks", "1", "--width", "32",
                                     "--heads", "2", "--feed-forward", "48", "--vocabulary", "300",
                                     "--steps", "2", "--ranks", "1", "--optimizer-state", "int8"});
  ASSERT_TRUE(small.status.ok()) << small.output;
  EXPECT_THAT(small.output, HasSubstr("qwen3 of 0.0"));
  EXPECT_THAT(small.output, HasSubstr("(1 block, width 32)"));
}

struct PublishedRefusal {
  const char* name;
  Words words;
  const char* message;
};
class TrainPublishedErrors : public TrainPublished,
                             public ::testing::WithParamInterface<PublishedRefusal> {};

TEST_P(TrainPublishedErrors, AreToldBeforeAStep) {
  publish(byte_config(Family::Qwen2, /*is_tied=*/true));
  fs::create_directory(ground_.run("empty"));
  fs::create_directory(ground_.run("damaged"));
  fs::copy(ground_.run("published") + "/config.json", ground_.run("damaged") + "/config.json");
  std::ofstream(ground_.run("damaged") + "/model.safetensors") << "no tensors";
  const auto result = train("run", GetParam().words);
  EXPECT_EQ(result.status.code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr(GetParam().message));
  EXPECT_THAT(result.output, HasSubstr("tessera train: "));
  EXPECT_FALSE(fs::exists(ground_.run("run"))) << result.output;
}

INSTANTIATE_TEST_SUITE_P(
    , TrainPublishedErrors,
    ::testing::Values(
        PublishedRefusal{"UnknownPreset", {"--preset", "gpt5"}, "qwen2.5-0.5b"},
        PublishedRefusal{"PresetAndFolder",
                         {"--preset", "gpt2", "--from", "published"},
                         "--preset: expected it without --from"},
        PublishedRefusal{"OtherFamily",
                         {"--preset", "gpt2", "--model", "llama"},
                         "--model: expected gpt2, which is what --preset gpt2 has, got llama"},
        PublishedRefusal{"NoFolder", {"--from", "nowhere"}, "got 'nowhere', which has no config"},
        PublishedRefusal{"NoConfig", {"--from", "empty"}, "got 'empty', which has no config.json"},
        PublishedRefusal{"NoTokenizer",
                         {"--from", "published"},
                         "--from: expected a tokenizer.json in 'published'"},
        PublishedRefusal{"OtherSizes",
                         {"--from", "published", "--tokenizer", "bytes", "--kv-heads", "4"},
                         "--kv-heads: expected none with --from"},
        PublishedRefusal{"OtherHead",
                         {"--from", "published", "--tokenizer", "bytes", "--no-tie-head"},
                         "--tie-head: expected none with --from"},
        PublishedRefusal{"LongContext",
                         {"--from", "published", "--tokenizer", "bytes", "--context", "65"},
                         "--context: expected at most 64"},
        PublishedRefusal{"SmallVocabulary",
                         {"--preset", "gpt2", "--vocabulary", "200", "--tokenizer", "bytes"},
                         "--vocabulary: expected at least 256"},
        PublishedRefusal{"Dropout",
                         {"--preset", "llama-3.2-1b", "--dropout", "0.1"},
                         "--dropout: expected 0 with models of kind llama"},
        PublishedRefusal{
            "TooManyRanksForHeads",
            {"--from", "published", "--tokenizer", "bytes", "--mesh", "tp=4", "--ranks", "4"},
            "expected tp to divide --heads 4 and --kv-heads 2, got tp=4"},
        PublishedRefusal{
            "DamagedWeights", {"--from", "damaged", "--tokenizer", "bytes"}, "model.safetensors"},
        PublishedRefusal{"DecodersFlag", {"--model", "gpt", "--kv-heads", "2"}, "--kv-heads"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(TrainPublished, ExportErrorsSayWhatWasExpected) {
  const auto nothing = export_run(ground_.run("nothing"), ground_.run("model"));
  EXPECT_EQ(nothing.status.code, 2);
  EXPECT_THAT(nothing.output, HasSubstr("expected the folder of a run of tessera train"));
  ASSERT_TRUE(ground_.train("run", {"--steps", "2", "--ranks", "1"}).status.ok());
  const auto onto = export_run(ground_.run("run"), ground_.run("run"));
  EXPECT_EQ(onto.status.code, 2);
  EXPECT_THAT(onto.output, HasSubstr("which is that of a run"));
  const auto dtype = export_run(ground_.run("run"), ground_.run("model"), {"--dtype", "int8"});
  EXPECT_EQ(dtype.status.code, 2);
  fs::remove_all(fs::path(ground_.run("run")) / "checkpoints");
  const auto unsaved = export_run(ground_.run("run"), ground_.run("model"));
  EXPECT_EQ(unsaved.status.code, 2);
  EXPECT_THAT(unsaved.output, HasSubstr("which has none yet"));
  EXPECT_FALSE(fs::exists(ground_.run("model")));
}

const std::string kLoad = R"py(
import os
try:
    import transformers
except ImportError as error:
    print(error)
    transformers = None
if transformers is not None:
    folder = os.environ["FOLDER"]
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    model.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = bytes(inputs["text"].tolist()).decode()
    outputs["tokens"] = torch.tensor(tokenizer(text)["input_ids"])
    assert tokenizer.decode(outputs["tokens"]) == text
    with torch.no_grad():
        logits = model(outputs["tokens"][None, :32]).logits
        outputs["loss"] = torch.nn.functional.cross_entropy(logits[0, :-1], outputs["tokens"][1:32])
)py";

/// The trainer's own model becomes a GPT-2; each byte of a text with all kinds of letters a token.
TEST_F(TrainPublished, PeerLoadsWhatWasExported) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const std::string text = "line 3 of a text; naïve café, 北京 🙂\t\"\\\n\x7f\u00ad\u0100 end";
  std::vector<int64_t> bytes;
  for (const unsigned char byte : text) bytes.push_back(byte);
  const auto tokens = at::tensor(bytes, at::kLong);
  for (const std::string kind : {"gpt", "qwen2"}) {
    SCOPED_TRACE(kind);
    ASSERT_TRUE(ground_.train(kind, {"--model", kind}).status.ok());
    const auto folder = ground_.run(kind + "-exported");
    const auto exported = export_run(ground_.run(kind), folder);
    ASSERT_TRUE(exported.status.ok()) << exported.output;
    const auto peer = run_peer(kLoad, {{"text", tokens}}, {.environment = {{"FOLDER", folder}}});
    ASSERT_TRUE(peer.ok());
    if (peer.tensors.empty()) GTEST_SKIP() << peer.output;
    EXPECT_TRUE(at::equal(peer["tokens"], tokens));
    auto net = models::from_pretrained(folder);
    const torch::NoGradGuard no_grad;
    const auto loss =
        net->loss(tokens.narrow(0, 0, 31).unsqueeze(0), tokens.narrow(0, 1, 31).unsqueeze(0));
    EXPECT_NEAR(peer["loss"].item<double>(), loss.item<double>(), 1e-5);
  }
}

}  // namespace
}  // namespace tessera::testing
