// The program behind `tessera inspect`.
#include <tessera/tessera.h>

#include "state/torch_bytes.h"
#include "support/ranks.h"
#include "support/subprocess.h"
#include "support/temporary_folder.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

ProgramResult inspect(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), TESSERA_INSPECT);
  const TemporaryFolder folder;
  return run_program({.arguments = std::move(arguments), .output = folder.path() / "output"});
}

class InspectOnThreads : public ::testing::Test {
 protected:
  InspectOnThreads() {
    run_threads(2, [&] {
      auto net = seeded(1, [] { return nn::Linear(3, 5); });
      fully_shard(net);
      save((run_ / "checkpoints" / "step-9").string(), net, {{"step", "9"}});
      save((run_ / "checkpoints" / "step-10").string(), net, {{"step", "10"}});
    });
  }

  TemporaryFolder folder_;
  fs::path run_ = folder_.path() / "run";
};

TEST_F(InspectOnThreads, ListsACheckpoint) {
  const auto result = inspect({(run_ / "checkpoints" / "step-10").string(), "--verify"});
  EXPECT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("weight  Float  [5, 3]  60 B"), HasSubstr("rank 0 [0:3, 0:3]"),
                    HasSubstr("rank 1 [3:5, 0:3]"), HasSubstr("2 tensors, 80 B, saved by 2 ranks"),
                    HasSubstr("step (2 B)"), HasSubstr("verified: every byte")));
}

TEST_F(InspectOnThreads, ListsARunAndItsLatestCheckpoint) {
  const auto result = inspect({run_.string(), "--json"});
  ASSERT_TRUE(result.status.ok()) << result.output;
  const auto json = nlohmann::json::parse(result.output);
  EXPECT_EQ(json["kind"], "run");
  ASSERT_EQ(json["checkpoints"].size(), 2U);
  EXPECT_EQ(json["checkpoints"][0]["name"], "step-9");
  EXPECT_EQ(json["path"], (run_ / "checkpoints" / "step-10").string());
  EXPECT_EQ(json["index"]["world_size"], 2);
  EXPECT_EQ(json["index"]["tensors"][1]["parts"][1]["offset"], (std::vector<int64_t>{3, 0}));

  fs::remove(run_ / "checkpoints" / "step-10" / "rank-00001-of-00002.safetensors");
  const auto older = inspect({run_.string()});
  EXPECT_TRUE(older.status.ok());
  EXPECT_THAT(older.output, AllOf(HasSubstr("incomplete"), HasSubstr("checkpoints/step-9\n")));
}

TEST_F(InspectOnThreads, ListsAFolderOfCheckpoints) {
  const auto checkpoints = run_ / "checkpoints";
  const auto table = inspect({checkpoints.string()});
  EXPECT_TRUE(table.status.ok());
  EXPECT_EQ(table.output, inspect({run_.string()}).output);
  const auto json = nlohmann::json::parse(inspect({checkpoints.string(), "--json"}).output);
  EXPECT_EQ(json["kind"], "folder");
  EXPECT_EQ(json["checkpoints"].size(), 2U);
  EXPECT_EQ(json["path"], (checkpoints / "step-10").string());
}

TEST_F(InspectOnThreads, FailsIfNoCheckpointIsWhole) {
  for (const char* step : {"step-9", "step-10"})
    fs::resize_file(run_ / "checkpoints" / step / "rank-00001-of-00002.safetensors", 3);
  for (const auto& path : {run_, run_ / "checkpoints"}) {
    const auto result = inspect({path.string()});
    EXPECT_EQ(result.status.code, 1);
    EXPECT_THAT(result.output,
                AllOf(HasSubstr("as the index says, got 3;"), HasSubstr("no whole checkpoint\n"),
                      HasSubstr("tessera inspect: " + path.string() +
                                ": expected a whole checkpoint, got "
                                "2 that can't be loaded")));
  }
}

TEST(Inspect, RefusesWrongWords) {
  const auto without = inspect({});
  EXPECT_EQ(without.status.code, 2);
  EXPECT_EQ(without.output,
            "tessera inspect: expected the path of a file, a checkpoint or a run; see tessera "
            "inspect --help\n");
  const auto unknown = inspect({"a", "--verfy"});
  EXPECT_EQ(unknown.status.code, 2);
  EXPECT_THAT(unknown.output, AllOf(HasSubstr("tessera inspect: "), HasSubstr("--verfy")));
  EXPECT_TRUE(inspect({"--help"}).status.ok());
}

TEST_F(InspectOnThreads, PrintsNamesSoThatATerminalOnlyShowsThem) {
  const auto file = (folder_.path() / "a.safetensors").string();
  const std::string name = "w\x1b]0;title\x07\r\u009b2J";
  write_safetensors(file, {{name, at::ones({2})}});
  const auto table = inspect({file});
  EXPECT_TRUE(table.status.ok());
  EXPECT_THAT(table.output, HasSubstr("w\\x1b]0;title\\x07\\x0d\\xc2\\x9b2J  Float"));
  const auto json = inspect({file, "--json"});
  EXPECT_EQ(nlohmann::json::parse(json.output)["index"]["tensors"][0]["name"], name);
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(stream), {});
  stream.clear();
  const auto at = bytes.find("F32");
  ASSERT_NE(at, std::string::npos);
  stream.seekp(static_cast<std::streamoff>(at));
  stream.write("F33", 3);
  stream.close();
  const auto damaged = inspect({file});
  EXPECT_THAT(damaged.output, HasSubstr("for tensor 'w\\x1b]0;title"));
  for (const auto& output : {table.output, json.output, damaged.output}) {
    for (const char* sign : {"\x1b", "\x07", "\r", "\xc2\x9b"})
      EXPECT_EQ(output.find(sign), std::string::npos) << output;
  }
}

TEST_F(InspectOnThreads, ListsAPlainFileAndSaysWhatIsWrong) {
  const auto file = (folder_.path() / "a.safetensors").string();
  write_safetensors(file, {{"w", at::ones({2, 2}, at::kHalf)}});
  EXPECT_THAT(inspect({file}).output,
              AllOf(HasSubstr("w       Half   [2, 2]  8 B"), HasSubstr("1 tensors, 8 B")));
  std::ofstream(file) << "nonsense";
  for (const auto& path : {file, (folder_.path() / "none").string()}) {
    const auto result = inspect({path});
    EXPECT_EQ(result.status.code, 1);
    EXPECT_THAT(result.output, AllOf(HasSubstr("tessera inspect: "), HasSubstr(path)));
  }
  EXPECT_THAT(inspect({(folder_.path() / "none").string()}).output,
              HasSubstr("none, which does not exist; correct the path"));
}

TEST(Inspect, ListsAFileOfTorchSave) {
  const TemporaryFolder folder;
  const auto file = (folder.path() / "a.pt").string();
  std::ofstream(file, std::ios::binary) << torch_file_of(some_pickle());
  const auto result = inspect({file, "--verify"});
  EXPECT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("model/w  Float"), HasSubstr("[3, 2]  24 B"),
                                   HasSubstr("4 tensors, "), HasSubstr("read in full")));
  auto bytes = torch_file_of(some_pickle());
  bytes[bytes.find(std::string(24, 'w'))] = 'x';
  std::ofstream(file, std::ios::binary) << bytes;
  EXPECT_THAT(inspect({file, "--verify"}).output, HasSubstr("'archive/data/0'"));
}

}  // namespace
}  // namespace tessera::testing
