// Folders: several files, other dtypes, and what may be wrong with them.
#include <tessera/fully_shard.h>
#include <tessera/models.h>
#include <tessera/state_dict.h>

#include "models/small_models.h"
#include "support/message_of.h"
#include "support/random.h"
#include "support/temporary_folder.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <random>
#include <set>

namespace tessera::testing {
namespace {

using models::CausalLM;
using models::Family;
using ::testing::HasSubstr;

std::set<std::string> files_in(const TemporaryFolder& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    names.insert(entry.path().filename().string());
  return names;
}

TEST(PretrainedFolder, IsReplacedByAnotherNumberOfFiles) {
  const TemporaryFolder folder;
  const auto path = folder.path().string();
  write_text(folder.path() / "tokenizer.json", "{}");
  const auto config = small_config(Family::Qwen2, false);
  write_text(folder.path() / "model-best-of-3.safetensors", "another's");
  auto first = small_model(config, 1), second = small_model(config, 2);
  models::save_pretrained(first, path, {.max_shard_bytes = 50000});
  EXPECT_EQ(files_in(folder), (std::set<std::string>{
                                  "config.json", "model-00001-of-00002.safetensors",
                                  "model-00002-of-00002.safetensors", "model-best-of-3.safetensors",
                                  "model.safetensors.index.json", "tokenizer.json"}));
  const auto written = read_safetensors(path);
  const auto held = state_dict(first);
  ASSERT_EQ(written.size(), held.size());
  for (const auto& [name, tensor] : held) {
    const auto* value = written.find(name);
    ASSERT_NE(value, nullptr) << name;
    EXPECT_TRUE(at::equal(*value, tensor)) << name;
  }
  models::save_pretrained(second, path);
  EXPECT_EQ(files_in(folder), (std::set<std::string>{"config.json", "model-best-of-3.safetensors",
                                                     "model.safetensors", "tokenizer.json"}));
  const auto tokens = small_batch().tokens;
  auto loaded = models::from_pretrained(path);
  EXPECT_TRUE(at::equal(loaded(tokens), second(tokens)));
  models::save_pretrained(first, path, {.max_shard_bytes = 50000});
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "model.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "model-best-of-3.safetensors"));
  auto again = models::from_pretrained(path);
  EXPECT_TRUE(at::equal(again(tokens), first(tokens)));
}

TEST(PretrainedFolder, IsEvaluatedUntilItIsTrained) {
  const TemporaryFolder folder;
  const auto path = folder.path().string();
  auto config = small_config(Family::GPT2, true);
  config.embd_pdrop = config.resid_pdrop = 0.5;
  auto model = small_model(config);
  models::save_pretrained(model, path);
  model->eval();
  auto loaded = models::from_pretrained(path);
  const auto tokens = small_batch().tokens;
  EXPECT_FALSE(loaded->is_training());
  EXPECT_TRUE(at::equal(loaded(tokens), model(tokens)));
  loaded->train();
  models::load_pretrained(path, loaded);
  EXPECT_TRUE(loaded->is_training());
}

TEST(PretrainedFolder, ConvertsDtypes) {
  const TemporaryFolder folder;
  const auto path = folder.path().string();
  auto model = small_model(small_config(Family::Llama, true));
  model->to(at::kBFloat16);
  models::save_pretrained(model, path);
  EXPECT_EQ(read_safetensors(path)["model.norm.weight"].scalar_type(), at::kBFloat16);
  const auto wide = models::from_pretrained(path);
  const auto narrow = models::from_pretrained(path, {.dtype = at::kBFloat16});
  const auto before = model->parameters(), as_float = wide->parameters(),
             as_half = narrow->parameters();
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(at::equal(as_float[i], before[i].to(at::kFloat)));
    EXPECT_TRUE(at::equal(as_half[i], before[i]));
    EXPECT_TRUE(as_half[i].requires_grad());
  }
}

/// GPT-2's published file has neither a prefix nor a head, but masks.
TEST(PretrainedFolder, TakesNamesOfModelsWithoutHead) {
  const TemporaryFolder folder;
  const auto path = folder.path().string();
  auto model = small_model(small_config(Family::GPT2, true));
  models::save_pretrained(model, path);
  StateDict bare;
  for (const auto& [name, tensor] : read_safetensors(path))
    bare.insert(name.substr(std::string("transformer.").size()), tensor);
  bare.insert("h.0.attn.bias", at::ones({1, 1, 64, 64}));
  write_safetensors(path + "/model.safetensors", bare);
  auto loaded = models::from_pretrained(path);
  const auto tokens = small_batch().tokens;
  EXPECT_TRUE(at::equal(loaded(tokens), model(tokens)));
}

TEST(PretrainedFolder, CopiesTheTokenizer) {
  const TemporaryFolder folder;
  write_text(folder.path() / "from/tokenizer.json", "{\"a\": 1}");
  write_text(folder.path() / "from/generation_config.json", "{}");
  const auto to = (folder.path() / "to").string();
  models::save_pretrained(small_model(small_config(Family::Qwen3, true)), to,
                          {.tokenizer_from = (folder.path() / "from").string()});
  std::ifstream file(to + "/tokenizer.json");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "{\"a\": 1}");
  EXPECT_TRUE(std::filesystem::exists(to + "/generation_config.json"));
}

class PretrainedErrors : public ::testing::Test {
 protected:
  /// Saves a small model in two files.
  PretrainedErrors() {
    models::save_pretrained(small_model(small_config(Family::Llama, false)), path_,
                            {.max_shard_bytes = 50000});
  }
  std::string load_error() {
    return message_of([&] { models::from_pretrained(path_); });
  }
  void write_index(const std::string& text) {
    write_text(folder_.path() / "model.safetensors.index.json", text);
  }

  TemporaryFolder folder_;
  std::string path_ = folder_.path().string();
};

TEST_F(PretrainedErrors, ListAllThatDiffers) {
  auto dict = read_safetensors(path_);
  dict.erase("model.norm.weight");
  dict.insert("model.other.weight", at::ones({2}));
  dict["lm_head.weight"] = at::ones({3, 32});
  write_safetensors(path_ + "/model.safetensors", dict);
  const auto message = load_error();
  EXPECT_THAT(message, HasSubstr("from_pretrained: " + path_));
  EXPECT_THAT(message, HasSubstr("expected the names and shapes of a llama model"));
  EXPECT_THAT(message, HasSubstr("missing: 'model.norm.weight'"));
  EXPECT_THAT(message, HasSubstr("unexpected: 'model.other.weight'"));
  EXPECT_THAT(message,
              HasSubstr("of another shape: 'lm_head.weight (expected [61, 32], got [3, 32])'"));
}

TEST_F(PretrainedErrors, IndexesThatAreWrong) {
  write_index("{}");
  EXPECT_THAT(load_error(), HasSubstr("expected 'weight_map' of the index, got none"));
  write_index(R"({"weight_map": {"a": 1}})");
  EXPECT_THAT(load_error(), HasSubstr("'a' of 'weight_map'"));
  for (const auto* name : {"../x.safetensors", "/etc/passwd", "..", ""}) {
    write_index(std::string(R"({"weight_map": {"a": ")") + name + "\"}}");
    EXPECT_THAT(load_error(), HasSubstr("expected names of files beside the index"));
  }
  write_index(R"({"weight_map": {"a": "model-00001-of-00002.safetensors"}})");
  EXPECT_THAT(load_error(), HasSubstr("expected tensor 'a' in model-00001-of-00002.safetensors"));
  write_index(R"({"weight_map": {"a": "none.safetensors"}})");
  EXPECT_THAT(load_error(), HasSubstr("none.safetensors: expected a file that can be read"));
  write_safetensors(path_ + "/a.safetensors", {{"a", at::ones({1})}, {"b", at::ones({1})}});
  write_safetensors(path_ + "/b.safetensors", {{"b", at::ones({1})}});
  write_index(R"({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}})");
  EXPECT_THAT(load_error(), HasSubstr("expected each tensor in one file, got 'b' in two"));
}

TEST_F(PretrainedErrors, HostileIndexes) {
  std::ifstream file(path_ + "/model.safetensors.index.json");
  const std::string index(std::istreambuf_iterator<char>(file), {});
  std::mt19937_64 random(test_seed());
  int refused = 0;
  for (int round = 0; round < 100; ++round) {
    auto text = index;
    const auto place = random() % text.size();
    if (round % 2 == 0)
      text[place] = static_cast<char>(random());
    else
      text.erase(place, 1 + random() % 9);
    write_index(text);
    try {
      models::from_pretrained(path_);
    } catch (const c10::ValueError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 50);
}

/// Sizes for which there is no memory are compared before any is taken.
TEST_F(PretrainedErrors, SizesThatAreNotThoseOfTheFiles) {
  auto config = small_config(Family::Llama, false);
  config.vocab_size = 2147483647;
  config.hidden_size = 1 << 22;
  config.head_dim = 8;
  write_text(folder_.path() / "config.json", models::config_text(config));
  EXPECT_THAT(load_error(), HasSubstr("of another shape: 'model.embed_tokens.weight (expected "
                                      "[2147483647, 4194304], got [61, 32])'"));
}

TEST_F(PretrainedErrors, ModelsWithoutMemory) {
  auto net = [&] {
    const MetaInit no_memory;
    return CausalLM(models::read_config(path_));
  }();
  const auto message = message_of([&] { models::load_pretrained(path_, net); });
  EXPECT_THAT(message, HasSubstr("load_pretrained: expected a model whose parameters have memory"));
  EXPECT_THAT(message, HasSubstr("'model.embed_tokens.weight'"));
  EXPECT_THAT(message, HasSubstr("from_pretrained"));
}

TEST_F(PretrainedErrors, FoldersWithoutWeights) {
  std::filesystem::remove(folder_.path() / "model.safetensors.index.json");
  EXPECT_THAT(load_error(), HasSubstr("expected a folder with model.safetensors or "
                                      "model.safetensors.index.json, got one without"));
}

TEST_F(PretrainedErrors, SavingWhatCanNotBe) {
  const auto model = small_model(small_config(Family::Llama, false));
  EXPECT_THAT(message_of([&] { models::save_pretrained(model, path_, {.max_shard_bytes = 0}); }),
              HasSubstr("save_pretrained: expected max_shard_bytes above 0, got 0"));
  EXPECT_THAT(message_of([&] { models::save_pretrained(model, ""); }),
              HasSubstr("save_pretrained: expected the path of a folder, got none"));
  EXPECT_THAT(message_of([&] { models::save_pretrained(model, path_, {.tokenizer_from = "/x"}); }),
              HasSubstr("expected a tokenizer's files in /x"));
  write_text(folder_.path() / "from/generation_config.json", "{}");
  const auto from = (folder_.path() / "from").string();
  EXPECT_THAT(message_of([&] { models::save_pretrained(model, path_, {.tokenizer_from = from}); }),
              HasSubstr("expected a tokenizer's files in " + from));
}

}  // namespace
}  // namespace tessera::testing
