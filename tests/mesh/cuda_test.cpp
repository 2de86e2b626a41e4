// Meshes of GPUs.
#include <tessera/mesh.h>

#include "compose/on_device.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

class MeshOnDevices : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(OnCuda, MeshOnDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl", "shm", "gloo"}, {2})),
                         backend_name);

TEST_P(MeshOnDevices, GroupsOfDimensionsSumOverTheirRanks) {
  run(4, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "tp"});
    EXPECT_EQ(mesh.device_type(), run_device().type());
    const auto own = at::full({3}, 1.0 + rank(), at::TensorOptions(run_device()));
    const auto sum = [&](const Group& group) {
      return all_reduce(own, ReduceOp::SUM, group)[0].item<double>();
    };
    // [[0, 1], [2, 3]]
    EXPECT_EQ(sum(mesh.group("tp")), rank() < 2 ? 3 : 7);
    EXPECT_EQ(sum(mesh.group("dp")), rank() % 2 == 0 ? 4 : 6);
    EXPECT_EQ(sum(default_group()), 10);
  });
}

TEST_P(MeshOnDevices, SlicesAreMeshesOfTheSameDevice) {
  run(4, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "tp"});
    const auto tp = mesh["tp"];
    EXPECT_EQ(tp.device_type(), run_device().type());
    EXPECT_EQ(tp.local_rank(), rank() % 2);
    const auto all =
        all_gather(at::full({1}, rank(), at::TensorOptions(run_device())), 0, tp.group());
    EXPECT_EQ(all.device(), run_device());
    EXPECT_EQ(all[0].item<int>(), rank() / 2 * 2);
  });
}

TEST_P(MeshOnDevices, OneDimensionIsTheWorld) {
  run(2, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2});
    const auto sum = all_reduce(at::ones({2}, run_device()), ReduceOp::SUM, mesh.group());
    EXPECT_EQ(sum.device(), run_device());
    EXPECT_EQ(sum[1].item<int>(), 2);
  });
}

}  // namespace
}  // namespace tessera::testing
