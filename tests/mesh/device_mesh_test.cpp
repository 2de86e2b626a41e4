#include <tessera/mesh.h>

#include "comm/context.h"
#include "support/ranks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>
#include <unordered_set>

namespace tessera {
namespace {

using testing::fake_world;
using Coordinate = std::vector<int64_t>;
using Names = std::vector<std::string>;
using Ranks = std::vector<int>;

std::string text(const DeviceMesh& mesh) {
  std::ostringstream out;
  out << mesh;
  return out.str();
}

std::vector<int64_t> flat_ranks(const DeviceMesh& mesh) {
  const at::Tensor ranks = mesh.ranks();
  return {ranks.const_data_ptr<int64_t>(), ranks.const_data_ptr<int64_t>() + ranks.numel()};
}

size_t mesh_group_count() { return comm::current_context()->mesh_groups.size(); }

TEST(DeviceMesh, NumbersRanksInRowMajorOrder) {
  const auto world = fake_world(3, 6);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.ndim(), 2);
  EXPECT_EQ(mesh.shape(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(mesh.size(), 6);
  EXPECT_EQ(mesh.dim_names(), (Names{"dp", "tp"}));
  EXPECT_TRUE(at::equal(mesh.ranks(), at::arange(6).view({2, 3})));
  EXPECT_EQ(mesh.coordinate(), (Coordinate{1, 0}));
}

TEST(DeviceMesh, TakesTensorsOfEveryIntegerTypeAndLayout) {
  const auto world = fake_world(2, 6);
  const at::Tensor ranks = at::arange(6).view({2, 3});
  const DeviceMesh expected(at::kCPU, ranks);
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    EXPECT_EQ(DeviceMesh(at::kCPU, ranks.to(dtype)), expected) << dtype;
  }
  const DeviceMesh transposed(at::kCPU, ranks.t());
  EXPECT_TRUE(at::equal(transposed.ranks(), ranks.t()));
  EXPECT_EQ(transposed.coordinate(), (Coordinate{2, 0}));
}

TEST(DeviceMesh, TakesListsAsOneDimension) {
  const auto world = fake_world(1, 4);
  const DeviceMesh listed(at::kCPU, {3, 1, 0});
  EXPECT_EQ(listed.shape(), (std::vector<int64_t>{3}));
  EXPECT_EQ(flat_ranks(listed), (std::vector<int64_t>{3, 1, 0}));
  EXPECT_EQ(listed.local_rank(), 1);
  EXPECT_EQ(DeviceMesh(at::kCPU, std::vector<int64_t>{3, 1, 0}), listed);
  EXPECT_EQ(DeviceMesh(at::kCPU, {3, 1, 0}, {"tp"}).dim_names(), Names{"tp"});
}

TEST(DeviceMesh, RanksAreACopy) {
  const auto world = fake_world(0, 2);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
  mesh.ranks().fill_(7);
  EXPECT_EQ(flat_ranks(mesh), (std::vector<int64_t>{0, 1}));
}

TEST(DeviceMesh, RecordsTheDeviceType) {
  const auto world = fake_world(0, 2);
  EXPECT_EQ(init_device_mesh(at::kCPU, {2}).device_type(), at::kCPU);
  EXPECT_EQ(init_device_mesh(at::kCUDA, {2}, {"dp"})["dp"].device_type(), at::kCUDA);
}

TEST(DeviceMesh, GivesEveryRankItsCoordinate) {
  for (int rank = 0; rank < 24; ++rank) {
    const auto world = fake_world(rank, 24);
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 3, 4}, {"a", "b", "c"});
    const Coordinate expected = {rank / 12, rank / 4 % 3, rank % 4};
    EXPECT_EQ(mesh.coordinate(), expected);
    for (int64_t dim = 0; dim < 3; ++dim) {
      EXPECT_EQ(mesh.local_rank(dim), expected[dim]);
      EXPECT_EQ(mesh.local_rank(dim - 3), expected[dim]);
      EXPECT_EQ(mesh.local_rank(mesh.dim_names()[dim]), expected[dim]);
    }
  }
}

TEST(DeviceMesh, CountsNegativeDimensionsFromTheEnd) {
  const auto world = fake_world(0, 6);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 3});
  EXPECT_EQ(mesh.size(0), 2);
  EXPECT_EQ(mesh.size(1), 3);
  EXPECT_EQ(mesh.size(-1), 3);
  EXPECT_EQ(mesh.size(-2), 2);
  EXPECT_EQ(mesh.group(-1), mesh.group(1));
}

TEST(DeviceMesh, GroupsRunAlongEachDimension) {
  const std::vector<Ranks> tp = {{0, 1}, {0, 1}, {2, 3}, {2, 3}};
  const std::vector<Ranks> dp = {{0, 2}, {1, 3}, {0, 2}, {1, 3}};
  for (int rank = 0; rank < 4; ++rank) {
    const auto world = fake_world(rank, 4);
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    EXPECT_EQ(ranks(mesh.group("tp")), tp[rank]);
    EXPECT_EQ(ranks(mesh.group("dp")), dp[rank]);
    EXPECT_EQ(mesh.group(0), mesh.group("dp"));
    EXPECT_EQ(mesh.group(1), mesh.group("tp"));
    EXPECT_EQ(tessera::rank(mesh.group("tp")), mesh.local_rank("tp"));
    EXPECT_EQ(tessera::rank(mesh.group("dp")), mesh.local_rank("dp"));
  }
}

TEST(DeviceMesh, GroupsKeepTheMeshsOrderOfRanks) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh(at::kCPU, at::tensor({3, 1, 2, 0}).view({2, 2}));
  EXPECT_EQ(ranks(mesh.group(0)), (Ranks{1, 0}));
  EXPECT_EQ(ranks(mesh.group(1)), (Ranks{2, 0}));
  EXPECT_EQ(tessera::rank(mesh.group(1)), 1);
}

TEST(DeviceMesh, MakesOnlyTheGroupsOfThisRank) {
  const auto world = fake_world(5, 8);
  const size_t before = mesh_group_count();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2});
  EXPECT_EQ(mesh_group_count() - before, 3u);
}

TEST(DeviceMesh, EqualSlicesOfDifferentMeshesShareTheirGroup) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  const size_t before = mesh_group_count();
  EXPECT_EQ(init_device_mesh(at::kCPU, {2, 2}).group(1), mesh.group("tp"));
  EXPECT_EQ(DeviceMesh(at::kCPU, {0, 2}).group(), mesh.group("dp"));
  EXPECT_EQ(mesh_group_count(), before);
}

TEST(DeviceMesh, SlicesToTheDimensionThroughThisRank) {
  const auto world = fake_world(5, 8);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 4}, {"dp", "tp"});
  const DeviceMesh tp = mesh["tp"];
  EXPECT_EQ(tp.shape(), (std::vector<int64_t>{4}));
  EXPECT_EQ(flat_ranks(tp), (std::vector<int64_t>{4, 5, 6, 7}));
  EXPECT_EQ(tp.dim_names(), Names{"tp"});
  EXPECT_EQ(tp.coordinate(), (Coordinate{1}));
  EXPECT_EQ(tp.local_rank(), 1);
  EXPECT_EQ(flat_ranks(mesh["dp"]), (std::vector<int64_t>{1, 5}));
}

TEST(DeviceMesh, SlicesToSeveralDimensions) {
  const auto world = fake_world(6, 8);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "cp", "tp"});
  const DeviceMesh slice = mesh[{"dp", "tp"}];
  EXPECT_TRUE(at::equal(slice.ranks(), at::tensor({2, 3, 6, 7}).view({2, 2})));
  EXPECT_EQ(slice.coordinate(), (Coordinate{1, 0}));
  EXPECT_EQ(slice, mesh[Names({"dp", "tp"})]);
  EXPECT_EQ(slice["tp"], mesh["tp"]);
  EXPECT_EQ(slice["tp"].group(), mesh.group("tp"));
}

TEST(DeviceMesh, SlicesShareTheMeshsGroupsAndRememberIt) {
  const auto world = fake_world(0, 8);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "cp", "tp"});
  const size_t before = mesh_group_count();
  EXPECT_EQ(mesh["cp"].group(), mesh.group("cp"));
  EXPECT_EQ((mesh[{"cp", "tp"}].group("tp")), mesh.group("tp"));
  EXPECT_EQ(mesh_group_count(), before);
  EXPECT_EQ((mesh[{"cp", "tp"}]["tp"].root()), mesh);
  EXPECT_EQ(mesh.root(), mesh);
}

TEST(DeviceMesh, SlicedToAllItsNamesIsItself) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  EXPECT_EQ((mesh[{"dp", "tp"}]), mesh);
  EXPECT_EQ(mesh["dp"]["dp"], mesh["dp"]);
}

TEST(DeviceMesh, SlicesOutliveTheMesh) {
  const auto world = fake_world(0, 4);
  const DeviceMesh tp = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"})["tp"];
  EXPECT_EQ(text(tp.root()), "DeviceMesh(cpu, dp=2 x tp=2, [[0, 1], [2, 3]])");
  EXPECT_EQ(ranks(tp.group()), (Ranks{0, 1}));
}

TEST(DeviceMesh, FlattensToOneDimension) {
  const auto world = fake_world(2, 4);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  const DeviceMesh flat = mesh.flatten();
  EXPECT_EQ(text(flat), "DeviceMesh(cpu, dp_tp=4, [0, 1, 2, 3])");
  EXPECT_EQ(flat.local_rank(), 2);
  EXPECT_EQ(ranks(flat.group()), (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(flat.root(), mesh);
}

TEST(DeviceMesh, CountsRowMajorInFlattenedDimensions) {
  const auto world = fake_world(4, 6);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 3}, {"dp", "tp"});
  EXPECT_EQ((mesh.coordinate()), (Coordinate{1, 1}));
  EXPECT_EQ(mesh.flatten().local_rank(), 4);
}

TEST(DeviceMesh, FindsFlattenedNamesFromTheRoot) {
  const auto world = fake_world(7, 8);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "cp", "tp"});
  const DeviceMesh copy = mesh;
  const DeviceMesh flat = mesh[{"dp", "cp"}].flatten();
  EXPECT_EQ(text(flat), "DeviceMesh(cpu, dp_cp=4, [1, 3, 5, 7])");
  EXPECT_EQ(mesh["dp_cp"], flat);
  EXPECT_EQ(copy["dp_cp"], flat);
  EXPECT_EQ(mesh.group("dp_cp"), flat.group());
  EXPECT_EQ(mesh.local_rank("dp_cp"), 3);
  EXPECT_EQ(text(mesh[{"dp_cp", "tp"}]),
            "DeviceMesh(cpu, dp_cp=4 x tp=2, [[0, 1], [2, 3], [4, 5], [6, 7]])");
  EXPECT_EQ((mesh[{"dp_cp", "tp"}].coordinate()), (Coordinate{3, 1}));
}

TEST(DeviceMesh, FlattensDimensionsThatAreNotNeighbours) {
  const auto world = fake_world(2, 8);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "cp", "tp"});
  EXPECT_EQ(flat_ranks(mesh[{"dp", "tp"}].flatten("outer")), (std::vector<int64_t>{2, 3, 6, 7}));
  EXPECT_EQ(flat_ranks(mesh["outer"]), (std::vector<int64_t>{2, 3, 6, 7}));
}

TEST(DeviceMesh, FlattenedTwiceUnderOneNameIsTheSame) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  const DeviceMesh first = mesh.flatten("all");
  const size_t before = mesh_group_count();
  EXPECT_EQ(mesh.flatten("all"), first);
  EXPECT_EQ(mesh.flatten("everyone").group(), first.group());
  EXPECT_EQ(mesh_group_count(), before);
}

TEST(DeviceMesh, FlattenedOneDimensionalMeshIsItself) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  EXPECT_EQ(mesh["tp"].flatten(), mesh["tp"]);
  const DeviceMesh renamed = mesh["tp"].flatten("model");
  EXPECT_EQ(renamed, mesh["model"]);
  EXPECT_EQ(mesh["model"].group(), mesh.group("tp"));
}

TEST(DeviceMesh, FlattensWithoutNamesIfGivenOne) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
  const DeviceMesh flat = mesh.flatten("all");
  EXPECT_EQ(flat, mesh["all"]);
}

TEST(DeviceMesh, FlattenedNamesBelongToOneRoot) {
  const auto world = fake_world(0, 4);
  const DeviceMesh first = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  const DeviceMesh second = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  first.flatten("all");
  EXPECT_EQ(first, second);
  EXPECT_THROW(second["all"], c10::ValueError);
}

TEST(DeviceMesh, MeshesAreFreedAfterFlattening) {
  const auto world = fake_world(0, 4);
  Group group;
  long uses = 0;
  {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    group = mesh.flatten("all").group();
    uses = group.use_count();
  }
  EXPECT_LT(group.use_count(),
            uses);  // the root's entry has gone: nothing keeps root and flattened mesh alive
}

TEST(DeviceMesh, RankOutsideHasNoCoordinateAndMakesNoGroups) {
  const auto world = fake_world(5, 8);
  const size_t before = mesh_group_count();
  const DeviceMesh mesh(at::kCPU, at::arange(4).view({2, 2}), {"dp", "tp"});
  EXPECT_EQ(mesh.coordinate(), std::nullopt);
  EXPECT_EQ(mesh.size(), 4);
  EXPECT_EQ(text(mesh), "DeviceMesh(cpu, dp=2 x tp=2, [[0, 1], [2, 3]])");
  EXPECT_EQ(text(mesh["tp"]), "DeviceMesh(cpu, tp=2, [0, 1])");
  EXPECT_EQ(mesh["tp"].coordinate(), std::nullopt);
  const DeviceMesh flat = mesh.flatten();
  EXPECT_EQ(flat, mesh["dp_tp"]);
  EXPECT_EQ(flat.coordinate(), std::nullopt);
  EXPECT_EQ(mesh_group_count(), before);
}

TEST(DeviceMesh, EqualsByContent) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  EXPECT_EQ(mesh, DeviceMesh(at::kCPU, at::arange(4).view({2, 2}), {"dp", "tp"}));
  EXPECT_EQ(mesh["tp"], DeviceMesh(at::kCPU, {0, 1}, {"tp"}));
  EXPECT_NE(mesh, init_device_mesh(at::kCPU, {2, 2}, {"dp", "cp"}));
  EXPECT_NE(mesh, init_device_mesh(at::kCPU, {2, 2}));
  EXPECT_NE(mesh, init_device_mesh(at::kCUDA, {2, 2}, {"dp", "tp"}));
  EXPECT_NE(mesh, init_device_mesh(at::kCPU, {4, 1}, {"dp", "tp"}));
  EXPECT_NE(mesh, DeviceMesh(at::kCPU, at::arange(4).view({2, 2}).t(), {"dp", "tp"}));
}

TEST(DeviceMesh, HashesByContent) {
  const auto world = fake_world(0, 4);
  std::unordered_set<DeviceMesh> meshes;
  meshes.insert(init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"}));
  meshes.insert(DeviceMesh(at::kCPU, at::arange(4).view({2, 2}), {"dp", "tp"}));
  meshes.insert(init_device_mesh(at::kCPU, {2, 2}));
  meshes.insert(init_device_mesh(at::kCPU, {4}));
  EXPECT_EQ(meshes.size(), 3u);
}

TEST(DeviceMesh, PrintsShapeNamesAndRanks) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(text(init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"})),
            "DeviceMesh(cpu, dp=2 x tp=2, [[0, 1], [2, 3]])");
  EXPECT_EQ(text(init_device_mesh(at::kCUDA, {2, 2})), "DeviceMesh(cuda, 2 x 2, [[0, 1], [2, 3]])");
  EXPECT_EQ(text(DeviceMesh(at::kCPU, {2, 0})), "DeviceMesh(cpu, 2, [2, 0])");
}

TEST(DeviceMesh, PrintsLongRankListsAbbreviated) {
  const auto world = fake_world(0, 128);
  EXPECT_EQ(text(init_device_mesh(at::kCPU, {2, 64}, {"dp", "tp"})),
            "DeviceMesh(cpu, dp=2 x tp=64, [0, 1, 2, ..., 127])");
}

TEST(DeviceMesh, IsSlicedAndFlattenedByManyThreads) {
  const auto world = fake_world(0, 8);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "cp", "tp"});
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&mesh, context = comm::current_context()] {
      const comm::ContextScope scope(context);
      for (int index = 0; index < 50; ++index) {
        const std::string name = "flat" + std::to_string(index);
        const DeviceMesh flat = mesh[{"dp", "tp"}].flatten(name);
        EXPECT_EQ(flat, mesh[name]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ranks(mesh.group("flat49")), (Ranks{0, 1, 4, 5}));
}

TEST(DeviceMesh, EightDimensionsOf1024RanksTakeMilliseconds) {
  std::vector<double> milliseconds;
  for (int run = 0; run < 5; ++run) {
    const auto world = fake_world(777, 1024);
    const auto start = std::chrono::steady_clock::now();
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 4, 2, 4, 2, 2, 2, 2},
                                             {"a", "b", "c", "d", "e", "f", "g", "h"});
    mesh[{"b", "d", "h"}].flatten("inner");
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - start;
    milliseconds.push_back(elapsed.count());
    EXPECT_EQ(mesh["inner"].size(), 32);
  }
  std::nth_element(milliseconds.begin(), milliseconds.begin() + 2, milliseconds.end());
  EXPECT_LT(milliseconds[2], 50);
  RecordProperty("milliseconds", std::to_string(milliseconds[2]));
}

}  // namespace
}  // namespace tessera
