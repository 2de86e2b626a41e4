#include <tessera/mesh.h>

#include "support/ranks.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using Ranks = std::vector<int>;

class DeviceMeshRanks : public ::testing::TestWithParam<testing::RankKind> {};

float sum_over(const Group& group, float value) {
  return all_reduce(at::full({3}, value), ReduceOp::SUM, group)[1].item<float>();
}

TEST_P(DeviceMeshRanks, ReduceAlongEachDimension) {
  const auto body = [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const int me = rank();
    const float value = static_cast<float>(1 << me);
    EXPECT_EQ(ranks(mesh["tp"].group()), (Ranks{me / 2 * 2, me / 2 * 2 + 1}));
    EXPECT_EQ(ranks(mesh["dp"].group()), (Ranks{me % 2, me % 2 + 2}));
    EXPECT_EQ(sum_over(mesh.group("tp"), value), me < 2 ? 3 : 12);
    EXPECT_EQ(sum_over(mesh.group("dp"), value), me % 2 == 0 ? 5 : 10);
    EXPECT_EQ(sum_over(mesh.flatten().group(), value), 15);
  };
  testing::run_ranks(GetParam(), 4, body, {.backend = "shm"});
}

TEST_P(DeviceMeshRanks, OverlappingMeshesOfSomeRanksDoNotDisturbEachOther) {
  const auto body = [] {
    const DeviceMesh left(at::kCPU, {2, 0, 1});
    const DeviceMesh right(at::kCPU, {3, 1});
    const int me = rank();
    const float value = static_cast<float>(1 << me);
    EXPECT_EQ(left.coordinate().has_value(), me != 3);
    EXPECT_EQ(right.coordinate().has_value(), me % 2 == 1);
    if (left.coordinate()) {
      EXPECT_EQ(sum_over(left.group(), value), 7);
    }
    if (right.coordinate()) {
      EXPECT_EQ(sum_over(right.group(), value), 10);
    }
  };
  testing::run_ranks(GetParam(), 4, body, {.backend = "shm"});
}

INSTANTIATE_TEST_SUITE_P(AsThreadsAndProcesses, DeviceMeshRanks,
                         ::testing::Values(testing::RankKind::Threads,
                                           testing::RankKind::Processes),
                         [](const auto& kind) { return testing::to_string(kind.param); });

}  // namespace
}  // namespace tessera
