// Adapters in files.
#include <tessera/lora.h>
#include <tessera/serialize.h>

#include "lora/adapted_models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>

namespace tessera::testing {
namespace {

using nlohmann::json;

AdaptedNet adapted_net(uint64_t seed) {
  auto net = seeded(5, [] { return AdaptedNet(); });
  lora(net, small_lora());
  draw_adapters(net, seed);
  return net;
}

class LoraFiles : public ::testing::Test {
 protected:
  std::string path() const { return (folder_.path() / "adapter").string(); }
  json config() const {
    std::ifstream file(folder_.path() / "adapter" / "adapter_config.json");
    return json::parse(file);
  }
  void change(const std::string& field, const json& value) const {
    auto changed = config();
    changed[field] = value;
    std::ofstream(folder_.path() / "adapter" / "adapter_config.json") << changed.dump();
  }
  TemporaryFolder folder_;
};

TEST_F(LoraFiles, GoToAFolderAndBack) {
  const auto net = adapted_net(11);
  save_lora(path(), net, {.base_model = "acme/base"});
  EXPECT_EQ(config()["r"], 3);
  EXPECT_EQ(config()["lora_alpha"], 6);
  EXPECT_EQ(config()["peft_type"], "LORA");
  EXPECT_EQ(config()["base_model_name_or_path"], "acme/base");
  EXPECT_EQ(config()["target_modules"], json({"down", "up"}));
  const auto stored = read_safetensors(path() + "/adapter_model.safetensors");
  EXPECT_EQ(stored.size(), 8U);
  EXPECT_TRUE(stored.contains("base_model.model.first.up.lora_A.weight"));
  auto other = seeded(5, [] { return AdaptedNet(); });
  lora(other, read_lora_options(path()));
  load_lora(path(), other);
  const auto x = at::randn({3, 12});
  EXPECT_TRUE(at::equal(AdaptedNet(net)(x), other(x)));
}

TEST_F(LoraFiles, NameLayersWhereTheLastPartWouldNameMore) {
  auto net = AdaptedNet();
  lora(net, {.rank = 2, .targets = {"first.up", "head"}});
  save_lora(path(), net);
  EXPECT_EQ(config()["target_modules"], json({"first.up", "head"}));
  EXPECT_EQ(read_lora_options(path()).targets, std::vector<std::string>({"first.up", "head"}));
}

TEST_F(LoraFiles, AreInSavedCheckpointsToo) {
  const auto net = adapted_net(11);
  save(path(), net);
  auto other = adapted_net(12);
  load(path(), other);
  const auto x = at::randn({3, 12});
  EXPECT_TRUE(at::equal(AdaptedNet(net)(x), other(x)));
}

using LoraFilesErrors = LoraFiles;

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST_F(LoraFilesErrors, OfConfigs) {
  expect_part(message_of([&] { read_lora_options(path()); }), "adapter_config.json");
  save_lora(path(), adapted_net(11));
  const auto refused = [&](const std::string& field, const json& value) {
    const auto before = config()[field];
    change(field, value);
    const auto message = message_of([&] { read_lora_options(path()); });
    change(field, before);
    return message;
  };
  expect_part(refused("use_dora", true), "expected no use_dora");
  expect_part(refused("rank_pattern", {{"up", 4}}), "expected no rank_pattern");
  expect_part(refused("bias", "all"), "expected no bias");
  expect_part(refused("peft_type", "IA3"), "expected peft_type LORA, got '\"IA3\"'");
  expect_part(refused("r", 2.5), "expected r from 1");
  expect_part(refused("r", "two"), "expected a number for r");
  expect_part(refused("target_modules", ".*up"), "expected target_modules to be a list");
  EXPECT_EQ(read_lora_options(path()).rank, 3);
}

TEST_F(LoraFilesErrors, OfOtherAdapters) {
  save_lora(path(), adapted_net(11));
  auto net = AdaptedNet();
  lora(net, {.rank = 3, .alpha = 3, .targets = {"up", "down"}});
  expect_part(message_of([&] { load_lora(path(), net); }), "give lora() read_lora_options(folder)");
  auto fewer = AdaptedNet();
  lora(fewer, {.rank = 3, .alpha = 6, .targets = {"up", "head"}});
  const auto before = lora_state_dict(fewer)["first.up.lora_A.weight"].clone();
  const auto message = message_of([&] { load_lora(path(), fewer); });
  expect_part(message, "missing: 'head.lora_A.weight' and 'head.lora_B.weight'");
  expect_part(message, "unexpected: 'first.down.lora_A.weight'");
  expect_part(message, "nothing was loaded");
  EXPECT_TRUE(at::equal(lora_state_dict(fewer)["first.up.lora_A.weight"], before));
  auto mixed = AdaptedNet();
  lora(mixed, {.rank = 2, .targets = {"up"}});
  lora(mixed->head, {.rank = 4});
  expect_part(message_of<c10::NotImplementedError>([&] { save_lora(path(), mixed); }),
              "save lora_state_dict(net) instead");
}

}  // namespace
}  // namespace tessera::testing
