#include "dtensor/script_peer.h"
#include "support/device_cases.h"
#include "support/random.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Counts = std::map<std::string, double>;

/// Counts of samples; none after a failure.
Counts run_database(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), std::to_string(testing::test_seed()));
  const auto output = testing::run_script(TESSERA_OP_DB, arguments, std::chrono::minutes(4));
  if (::testing::Test::HasFailure()) return {};
  std::cout << output;
  return testing::counts_in(output, "samples");
}

void expect_right(Counts counts, double samples) {
  EXPECT_GT(counts["samples"], samples);
  EXPECT_EQ(counts["wrong"], 0);
  EXPECT_GE(counts["ran"], 0.95 * counts["samples"]);
  EXPECT_GE(counts["sharded"], 0.6 * counts["samples"]);
}

TEST(OperatorDatabasePeer, SamplesGiveWhatPlainTensorsGive) {
  if (auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  expect_right(run_database({"--every", "6"}), 1000);
}

class OperatorDatabaseOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::gpu_count() == 0) GTEST_SKIP() << "no GPU";
    if (auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  }
};

TEST_F(OperatorDatabaseOnCuda, FamiliesWithKernelsOfTheirOwnGiveWhatPlainTensorsGive) {
  expect_right(run_database({"--device", "cuda", "--families", "all", "--samples", "4"}), 250);
}

TEST_F(OperatorDatabaseOnCuda, SumsOfLowPrecisionGiveWhatPlainTensorsGive) {
  expect_right(run_database({"--device", "cuda", "--dtypes", "bfloat16", "--families",
                             "reductions,matrix,norms,losses,cumulative", "--samples", "3"}),
               50);
}

}  // namespace
}  // namespace tessera
