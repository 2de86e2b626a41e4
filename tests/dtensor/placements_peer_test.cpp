#include "dtensor/script_peer.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(PlacementsPeer, ResultsLieAsPyTorchsOrLessWasSent) {
  if (auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  const auto output =
      testing::run_script(TESSERA_PLACEMENTS_PEER, {"{folder}/pytorch"}, std::chrono::minutes(4));
  if (HasFailure()) return;
  std::cout << output;  // every difference, with its reason
  auto counts = testing::counts_in(output, "operators");
  EXPECT_GE(counts["operators"], 60);
  EXPECT_EQ(counts["worse"], 0) << "see the rows that begin with \"worse\" above";
  EXPECT_GE(counts["equal"] + counts["less"], 0.9 * counts["rows"])
      << "leaving work for later is the exception";
}

}  // namespace
}  // namespace tessera
