// Checkpoints that are damaged, hostile or of another model: an error, and nothing changed.
#include <tessera/tessera.h>

#include "base/crc32c.h"
#include "state/checkpoint_training.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <functional>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_bytes(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// An index whose last line is right, whatever is before it.
std::string sealed(std::string content) {
  if (content.ends_with('}')) content.pop_back();
  char seal[9];
  std::snprintf(seal, sizeof(seal), "%08x", crc32c(content.data(), content.size()));
  return content + ",\"checksum\":\"" + seal + "\"}\n";
}

constexpr const char* kIndex = "index.json";
constexpr const char* kFile0 = "rank-00000-of-00002.safetensors";
constexpr const char* kFile1 = "rank-00001-of-00002.safetensors";

/// A checkpoint of two ranks, and a plain model with its optimizer into which it is loaded.
class CheckpointDamage : public ::testing::Test {
 protected:
  CheckpointDamage() {
    run_threads(2, [&] {
      auto sharded = make_checkpoint_net(Layout::FullyShard);
      auto optimizer = make_adamw(sharded);
      train_step(sharded, optimizer, 0);
      save(dir_, sharded, optimizer, {{"step", "1"}});
    });
    train_step(net_, optimizer_, 5);
    before_ = wholes_of(net_, optimizer_, 0);
    for (const char* name : {kIndex, kFile0, kFile1})
      files_[name] = read_bytes(fs::path(dir_) / name);
  }

  fs::path path(const char* name) const { return fs::path(dir_) / name; }

  void put_back() {
    for (const auto& [name, bytes] : files_) write_bytes(fs::path(dir_) / name, bytes);
  }

  /// The message of a load that fails; nothing has changed.
  std::string refused() {
    const auto message = message_of<c10::ValueError>([&] { load(dir_, net_, optimizer_); });
    for (const auto& [name, tensor] : wholes_of(net_, optimizer_, 0))
      expect_bitwise_equal(tensor, before_.at(name), name);
    return message;
  }

  /// As if the index had been written so.
  std::string refused_index(const std::function<void(Json&)>& change) {
    auto json = Json::parse(files_.at(kIndex));
    json.erase("checksum");
    change(json);
    write_bytes(path(kIndex), sealed(json.dump()));
    auto message = refused();
    put_back();
    return message;
  }

  TemporaryFolder folder_;
  std::string dir_ = (folder_.path() / "step-1").string();
  CheckpointNet net_ = make_checkpoint_net(Layout::Plain, /*seed=*/5);
  optim::AdamW optimizer_ = make_adamw(net_);
  Wholes before_;
  std::map<std::string, std::string> files_;
};

TEST_F(CheckpointDamage, EveryFlippedBitIsNoticed) {
  for (const auto& [name, bytes] : files_) {
    // Every byte of length and header's beginning, and a share of the rest; every bit in turn.
    for (size_t i = 0; i < bytes.size(); i += i < 64 ? 1 : 97) {
      auto damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
      write_bytes(fs::path(dir_) / name, damaged);
      const auto message = refused();
      EXPECT_THAT(message, HasSubstr(name)) << "byte " << i;
      if (HasFailure()) return;
    }
    put_back();
  }
  EXPECT_EQ(load(dir_, net_, optimizer_).at("step"), "1");
}

TEST_F(CheckpointDamage, EveryTruncationIsNoticed) {
  for (const auto& [name, bytes] : files_) {
    for (size_t length = 0; length < bytes.size(); length += length < 32 ? 1 : 211) {
      write_bytes(fs::path(dir_) / name, bytes.substr(0, length));
      EXPECT_THAT(refused(), HasSubstr(name)) << length;
      if (HasFailure()) return;
    }
    write_bytes(fs::path(dir_) / name, bytes + "x");
    EXPECT_THAT(refused(), HasSubstr(name));
    put_back();
  }
}

TEST_F(CheckpointDamage, NamesTheTensorWhoseBytesDiffer) {
  const auto index = read_checkpoint_index(dir_);
  for (const auto& tensor : index.tensors) {
    const auto& part = tensor.parts.back();
    auto damaged = files_.at(part.file);
    damaged[part.position + part.bytes / 2] ^= 1;
    write_bytes(fs::path(dir_) / part.file, damaged);
    EXPECT_THAT(refused(), AllOf(HasSubstr("tensor '" + tensor.name + "'"), HasSubstr(part.file),
                                 HasSubstr("checksum")));
    EXPECT_THAT(message_of([&] { verify_checkpoint(dir_); }),
                HasSubstr("tensor '" + tensor.name + "'"));
    put_back();
  }
  EXPECT_NO_THROW(verify_checkpoint(dir_));
}

TEST_F(CheckpointDamage, AMissingFileIsNamed) {
  fs::remove(path(kFile1));
  EXPECT_THAT(refused(), AllOf(HasSubstr("load: "), HasSubstr(kFile1), HasSubstr("incomplete")));
  fs::remove(path(kIndex));
  EXPECT_THAT(refused(), HasSubstr("without an index.json"));
  fs::remove_all(dir_);
  EXPECT_THAT(refused(), HasSubstr("expected a checkpoint, got nothing"));
}

TEST_F(CheckpointDamage, FilesOfAnotherSaveAreNoticed) {
  // Of equal size: the same model a step later.
  const auto other = (folder_.path() / "step-2").string();
  run_threads(2, [&] {
    auto sharded = make_checkpoint_net(Layout::FullyShard, /*seed=*/3);
    auto optimizer = make_adamw(sharded);
    train_step(sharded, optimizer, 0);
    save(other, sharded, optimizer, {{"step", "1"}});
  });
  fs::copy_file(fs::path(other) / kFile1, path(kFile1), fs::copy_options::overwrite_existing);
  EXPECT_THAT(refused(), AllOf(HasSubstr(kFile1), HasSubstr("checksum")));
}

TEST_F(CheckpointDamage, IndexesThatMakeNoSense) {
  const auto part = [](Json& json, const char* name, size_t number) -> Json& {
    return json["tensors"][name]["parts"][number];
  };
  EXPECT_THAT(refused_index([&](Json& json) { part(json, "qkv.weight", 1)["offset"] = {17, 0}; }),
              AllOf(HasSubstr("'qkv.weight'"), HasSubstr("overlap or leave gaps")));
  EXPECT_THAT(refused_index([&](Json& json) { part(json, "qkv.weight", 1)["offset"] = {19, 0}; }),
              AllOf(HasSubstr("'qkv.weight'"), HasSubstr("within its shape")));
  EXPECT_THAT(refused_index([&](Json& json) { json["tensors"]["in.bias"]["parts"].erase(0); }),
              AllOf(HasSubstr("'in.bias'"), HasSubstr("overlap or leave gaps")));
  EXPECT_THAT(refused_index([&](Json& json) { part(json, "in.bias", 0)["position"] = 1 << 30; }),
              AllOf(HasSubstr("'in.bias'"), HasSubstr("within rank-")));
  EXPECT_THAT(refused_index([&](Json& json) { part(json, "in.bias", 0)["position"] = UINT64_MAX; }),
              AllOf(HasSubstr("'in.bias'"), HasSubstr("within rank-")));
  EXPECT_THAT(refused_index([&](Json& json) { part(json, "in.bias", 0)["bytes"] = 20; }),
              AllOf(HasSubstr("'in.bias'"), HasSubstr("by its shape")));
  EXPECT_THAT(refused_index([&](Json& json) {
                auto& one = part(json, "in.bias", 0);
                one["position"] = one["position"].get<int64_t>() + 4;
              }),
              AllOf(HasSubstr("'in.bias"), HasSubstr("header that differs")));
  EXPECT_THAT(refused_index([&](Json& json) { part(json, "in.bias", 0)["file"] = 2; }),
              HasSubstr("expected one of 2 files"));
  EXPECT_THAT(refused_index([&](Json& json) { part(json, "in.bias", 0)["checksums"] = ""; }),
              HasSubstr("expected 1 checksums"));
  EXPECT_THAT(
      refused_index([&](Json& json) { part(json, "in.bias", 0)["checksums"] = "0000000g"; }),
      HasSubstr("hexadecimal"));
  EXPECT_THAT(refused_index([&](Json& json) { part(json, "in.bias", 0)["offset"] = {-1}; }),
              HasSubstr("expected numbers from 0 in 'offset'"));
  EXPECT_THAT(refused_index([&](Json& json) { json["tensors"]["in.bias"]["dtype"] = "F31"; }),
              HasSubstr("got 'F31'"));
  EXPECT_THAT(refused_index([&](Json& json) { json["tensors"]["in.bias"]["shape"] = "12"; }),
              HasSubstr("expected a list as 'shape'"));
  EXPECT_THAT(refused_index([&](Json& json) {
                json["tensors"]["in.bias"]["shape"] = {1LL << 62, 1LL << 62};
              }),
              HasSubstr("overflow"));
  EXPECT_THAT(refused_index([&](Json& json) { json["files"].erase(1); }), HasSubstr(kIndex));
  EXPECT_THAT(refused_index([&](Json& json) { json["files"][0]["header_bytes"] = 1; }),
              HasSubstr("header"));
  EXPECT_THAT(refused_index([&](Json& json) { json["extras"].erase(1); }), HasSubstr("extras"));
  EXPECT_THAT(refused_index([&](Json& json) { json["aliases"]["in.bias"] = "in.weight"; }),
              HasSubstr("another name of a tensor"));
  EXPECT_THAT(refused_index([&](Json& json) { json["version"] = 2; }), HasSubstr("version 1"));
  EXPECT_THAT(refused_index([&](Json& json) { json["format"] = "x"; }), HasSubstr("another kind"));
  EXPECT_THAT(refused_index([&](Json& json) { json = Json::array(); }), HasSubstr("JSON"));
}

TEST_F(CheckpointDamage, IndexesThatAreNoJson) {
  const auto refused_text = [&](const std::string& text) {
    write_bytes(path(kIndex), sealed(text));
    return refused();
  };
  EXPECT_THAT(refused_text(R"({"format":"a","format":"b"})"), HasSubstr("the key 'format' twice"));
  EXPECT_THAT(refused_text(R"({"a":)" + std::string(100'000, '[') + "}"),
              HasSubstr("nested deeper than 16"));
  EXPECT_THAT(refused_text("{\"a\": nope"), HasSubstr("a mistake at character"));
  EXPECT_THAT(refused_text(""), HasSubstr("JSON"));
}

TEST_F(CheckpointDamage, OfTheOptimizer) {
  EXPECT_THAT(refused_index([](Json& json) { json["optimizer"] = nullptr; }),
              HasSubstr("saved without"));
  EXPECT_THAT(refused_index([](Json& json) { json["optimizer"]["groups"][0]["params"] = {"x"}; }),
              HasSubstr("missing: qkv.weight"));
  EXPECT_THAT(
      refused_index([](Json& json) { json["optimizer"]["groups"][0]["options"].erase("lr"); }),
      HasSubstr("expected the options"));
  EXPECT_THAT(refused_index([](Json& json) {
                json["optimizer"]["groups"][0]["options"]["lr"] = {{"double", -1.0}};
              }),
              HasSubstr("lr"));
  EXPECT_THAT(refused_index([](Json& json) {
                auto& tensors = json["tensors"];
                tensors["optimizer/in.bias/step"]["shape"] = {1, 1};
                tensors["optimizer/in.bias/step"]["parts"][0]["shape"] = {1, 1};
                tensors["optimizer/in.bias/step"]["parts"][0]["offset"] = {0, 0};
              }),
              HasSubstr("header that differs"));
}

TEST(CheckpointDamageOnThreads, OfWhatOneRankNeedsChangesNothingOnAnyRank) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "a").string();
  run_threads(2, [&] {
    auto net = make_checkpoint_net(Layout::FullyShard);
    save(dir, net);
    barrier();
    if (rank() == 0) {
      const auto tensors = read_checkpoint_index(dir).tensors;
      const auto found = std::find_if(tensors.begin(), tensors.end(), [](const auto& tensor) {
        return tensor.name == "in.weight";
      });
      const auto& part = found->parts.at(1);
      auto bytes = read_bytes(fs::path(dir) / part.file);
      bytes[part.position] ^= 1;
      write_bytes(fs::path(dir) / part.file, bytes);
    }
    barrier();
    auto other = make_checkpoint_net(Layout::FullyShard, /*seed=*/5);
    const auto optimizer = make_adamw(other);
    const auto before = wholes_of(other, optimizer, 0);
    EXPECT_THAT(message_of([&] { load(dir, other); }),
                AllOf(HasSubstr("load: rank 1: "), HasSubstr("tensor 'in.weight'")));
    for (const auto& [name, tensor] : wholes_of(other, optimizer, 0))
      expect_bitwise_equal(tensor, before.at(name), name);
  });
}

}  // namespace
}  // namespace tessera::testing
