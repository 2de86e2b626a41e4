#include "dtensor/script_peer.h"
#include "support/random.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(OperatorDatabasePeer, SamplesGiveWhatPlainTensorsGive) {
  if (auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  const auto output =
      testing::run_script(TESSERA_OP_DB, {std::to_string(testing::test_seed()), "--every", "6"},
                          std::chrono::minutes(4));
  if (HasFailure()) return;
  std::cout << output;
  auto counts = testing::counts_in(output, "samples");
  EXPECT_GT(counts["samples"], 1000);
  EXPECT_EQ(counts["wrong"], 0);
  EXPECT_GE(counts["ran"], 0.95 * counts["samples"]);
  EXPECT_GE(counts["sharded"], 0.6 * counts["samples"]);
}

}  // namespace
}  // namespace tessera
