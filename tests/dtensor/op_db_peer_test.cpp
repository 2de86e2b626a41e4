#include "support/peer.h"
#include "support/random.h"
#include "support/temporary_folder.h"

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>

namespace tessera {
namespace {

std::map<std::string, double> counts_in(const std::string& output) {
  const auto begin = output.rfind("samples ");
  std::map<std::string, double> counts;
  if (begin == std::string::npos) return counts;
  std::istringstream words(output.substr(begin));
  std::string name;
  for (double count = 0; words >> name >> count;) counts[name] = count;
  return counts;
}

TEST(OperatorDatabasePeer, SamplesGiveWhatPlainTensorsGive) {
  if (auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  const testing::TemporaryFolder folder;
  const auto script =
      c10::str("import runpy, sys\n", "sys.argv = ['op_db_peer.py', '", TESSERA_LIBRARY,
               "', str(rank), str(world_size), 'file://", folder.path().string(), "/store', '",
               testing::test_seed(), "', '--every', '6']\n", "runpy.run_path('", TESSERA_OP_DB,
               "', run_name='__main__')\n", "outputs = {}\n");
  const auto results = testing::run_peers(2, script, {}, {.deadline = std::chrono::minutes(4)});
  if (HasFailure()) return;
  std::cout << results[0].output;
  auto counts = counts_in(results[0].output);
  EXPECT_GT(counts["samples"], 1000);
  EXPECT_EQ(counts["wrong"], 0);
  EXPECT_GE(counts["ran"], 0.95 * counts["samples"]);
  EXPECT_GE(counts["sharded"], 0.6 * counts["samples"]);
}

}  // namespace
}  // namespace tessera
