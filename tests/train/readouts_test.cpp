// What a run tells of its communication.
#include "train/train_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>

namespace tessera::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

double sum_of(const json& rows, const char* field) {
  double sum = 0;
  for (const auto& row : rows) sum += row.at(field).get<double>();
  return sum;
}

class TrainReadouts : public ::testing::Test {
 protected:
  json train(const std::string& run, const Words& further) {
    const auto result = ground_.train(run, further);
    EXPECT_TRUE(result.status.ok()) << result.output;
    output_ = result.output;
    const auto text = ground_.read(run, "communication.json");
    return text.empty() ? json::array() : json::parse(text);
  }
  /// Bytes of all parameters.
  double model_bytes(const std::string& run) const {
    return 4 * json::parse(ground_.read(run, "run.json")).at("parameters").get<double>();
  }
  /// Seconds of communication of a step, as all readouts together tell of rank 0 and its peer.
  double seconds_per_step(const std::string& run) const {
    double seconds = 0;
    int steps = 0;
    std::istringstream lines(ground_.read(run, "metrics.jsonl"));
    for (std::string text; std::getline(lines, text);) {
      const auto line = json::parse(text);
      if (!line.contains("comm_share")) continue;
      seconds += line["comm_share"].get<double>() * line["step_seconds"].get<double>();
      ++steps;
    }
    return seconds / steps;
  }

  TrainingGround ground_;
  std::string output_;
};

TEST_F(TrainReadouts, TellWhatEachBucketOfGradientsCosts) {
  const auto rows = train("run", {});
  ASSERT_FALSE(rows.empty());
  EXPECT_EQ(sum_of(rows, "bytes"), model_bytes("run")) << "each gradient travels once a step";
  EXPECT_GT(sum_of(rows, "seconds"), 0);
  EXPECT_LT(sum_of(rows, "seconds"), 10 * seconds_per_step("run"));
  EXPECT_THAT(output_, HasSubstr("communication per step: "));
  EXPECT_THAT(ground_.read("run", "metrics.jsonl"), HasSubstr("\"communication\":[{\"bytes\":"));
}

TEST_F(TrainReadouts, TellWhatEachShardedUnitCosts) {
  const auto rows = train("run", {"--parallel", "fully_shard", "--eval-every", "3"});
  std::map<std::string, json> by_unit;
  for (const auto& row : rows) by_unit[row.at("unit")] = row;
  ASSERT_EQ(by_unit.size(), 3U) << rows;
  for (const char* unit : {"blocks.0", "blocks.1", "the rest"})
    EXPECT_GT(by_unit.at(unit).at("seconds"), 0) << unit;
  EXPECT_EQ(by_unit.at("blocks.0").at("bytes"), by_unit.at("blocks.1").at("bytes"));
  // Shards are seen in place on one host: gradients alone travel, and validation counts nothing.
  EXPECT_EQ(sum_of(rows, "bytes"), model_bytes("run"));
  EXPECT_THAT(output_, HasSubstr("communication per step: 3 units, "));
}

TEST_F(TrainReadouts, TellNothingWhereNothingTravels) {
  EXPECT_TRUE(train("alone", {"--ranks", "1"}).empty());
  EXPECT_THAT(output_, Not(HasSubstr("communication per step")));
}

TEST_F(TrainReadouts, AreInTheReport) {
  const auto rows = train("run", {"--parallel", "fully_shard"});
  const auto page = (ground_.path() / "page.html").string();
  const auto made =
      ground_.call({TESSERA_TOOL, "report", ground_.run("run"), "-o", page, "--open", "no"});
  ASSERT_TRUE(made.status.ok()) << made.output;
  EXPECT_THAT(made.output, Not(HasSubstr("could not be read")));
  std::ifstream file(page);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(text, HasSubstr("\"communication\":[{\"unit\":\"the rest\""));
}

}  // namespace
}  // namespace tessera::testing
