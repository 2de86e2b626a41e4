#include <tessera/mesh.h>

#include "support/message_of.h"
#include "support/ranks.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::fake_world;
using testing::message_of;
using Names = std::vector<std::string>;

class MeshErrors : public ::testing::Test {
 protected:
  static DeviceMesh square() {
    return DeviceMesh(at::kCPU, at::arange(4).view({2, 2}), {"dp", "tp"});
  }
};

TEST_F(MeshErrors, UseBeforeInit) {
  ASSERT_FALSE(is_initialized());
  EXPECT_NE(
      message_of<c10::Error>([] { init_device_mesh(at::kCPU, {1}); }).find("init_device_mesh"),
      std::string::npos);
  EXPECT_NE(message_of<c10::Error>([] { DeviceMesh(at::kCPU, {0}); }).find("DeviceMesh"),
            std::string::npos);
}

TEST_F(MeshErrors, DeviceThatThisMachineLacks) {
  if (at::hasCUDA()) GTEST_SKIP() << "there is a GPU";
  testing::run_threads(1,
                       [] {
                         EXPECT_EQ(message_of([] { init_device_mesh(at::kCUDA, {1}); })
                                       .find("init_device_mesh: expected a device type of this "
                                             "machine, got cuda"),
                                   0U);
                       },
                       {.backend = "shm"});
}

TEST_F(MeshErrors, DeviceThatHasNoRanks) {
  const auto world = fake_world(0, 1);
  EXPECT_EQ(
      message_of([] { init_device_mesh(at::kXPU, {1}); }),
      "init_device_mesh: expected a mesh of cpu or cuda, got xpu; pass the type of the device "
      "that the ranks compute on");
}

TEST_F(MeshErrors, ShapeThatDoesNotFillTheWorld) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { init_device_mesh(at::kCPU, {2, 3}); }),
            "init_device_mesh: expected a shape whose product is the world size 4, got [2, 3] with "
            "product 6; change "
            "the shape, start as many ranks, or list the ranks of a smaller mesh with DeviceMesh");
}

TEST_F(MeshErrors, ShapeTooLargeToCount) {
  const auto world = fake_world(0, 4);
  constexpr int64_t kHuge = int64_t{1} << 62;
  EXPECT_NE(message_of([] {
              init_device_mesh(at::kCPU, {kHuge, 4});
            }).find("the world size 4, got [4611686018427387904"),
            std::string::npos);
}

TEST_F(MeshErrors, EmptyShape) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { init_device_mesh(at::kCPU, {}); }),
            "init_device_mesh: expected at least one dimension, got an empty shape; pass {4} for a "
            "1-D mesh of all "
            "ranks");
}

TEST_F(MeshErrors, DimensionThatIsNotPositive) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { init_device_mesh(at::kCPU, {4, 0}); }),
            "init_device_mesh: expected positive sizes, got shape [4, 0]; give every dimension at "
            "least size 1");
  EXPECT_EQ(message_of([] { init_device_mesh(at::kCPU, {-2, -2}); }),
            "init_device_mesh: expected positive sizes, got shape [-2, -2]; give every dimension "
            "at least size 1");
}

TEST_F(MeshErrors, DuplicateRanks) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { DeviceMesh(at::kCPU, {0, 1, 1}); }),
            "DeviceMesh: expected distinct ranks, got rank 1 more than once in [0, 1, 1]; list "
            "every rank once, or use "
            "init_device_mesh to build a mesh from a shape");
}

TEST_F(MeshErrors, RankOutsideTheWorld) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { DeviceMesh(at::kCPU, {0, 4}); }),
            "DeviceMesh: expected ranks from 0 to 3, got rank 4 in [0, 4]; list ranks of the "
            "world, or start more than "
            "its 4");
}

TEST_F(MeshErrors, NegativeRank) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { DeviceMesh(at::kCPU, at::tensor({0, -1})); }),
            "DeviceMesh: expected ranks from 0 to 3, got rank -1 in [0, -1]; list ranks of the "
            "world, or start more "
            "than its 4");
}

TEST_F(MeshErrors, NoRanks) {
  const auto world = fake_world(0, 4);
  const std::string expected = "DeviceMesh: expected at least one rank, got none; list world ranks";
  EXPECT_EQ(message_of([] { DeviceMesh(at::kCPU, {}); }), expected);
  EXPECT_EQ(message_of([] { DeviceMesh(at::kCPU, at::arange(0)); }), expected);
}

TEST_F(MeshErrors, TensorThatIsNotOfIntegers) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of<c10::TypeError>([] { DeviceMesh(at::kCPU, at::arange(4).to(at::kFloat)); }),
            "DeviceMesh: expected an integer tensor of ranks, got one of float32; convert it with "
            "to(torch::kLong)");
  EXPECT_EQ(message_of<c10::TypeError>([] { DeviceMesh(at::kCPU, at::arange(2).to(at::kBool)); }),
            "DeviceMesh: expected an integer tensor of ranks, got one of bool; convert it with "
            "to(torch::kLong)");
}

TEST_F(MeshErrors, UndefinedTensor) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { DeviceMesh(at::kCPU, at::Tensor()); }),
            "DeviceMesh: expected an integer tensor of ranks, got an undefined tensor; pass e.g. "
            "torch::arange(4).view({2, 2})");
}

TEST_F(MeshErrors, ScalarTensor) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { DeviceMesh(at::kCPU, at::arange(4)[0]); }),
            "DeviceMesh: expected ranks with at least one dimension, got a scalar tensor; for a "
            "mesh of one rank pass "
            "{rank}");
}

TEST_F(MeshErrors, NumberOfNames) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { init_device_mesh(at::kCPU, {2, 2}, {"dp", "cp", "tp"}); }),
            "init_device_mesh: expected 2 dim_names, one per dimension, got 3 (\"dp\", \"cp\", "
            "\"tp\"); name every "
            "dimension or none");
}

TEST_F(MeshErrors, DuplicateNames) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { init_device_mesh(at::kCPU, {2, 2}, {"dp", "dp"}); }),
            "init_device_mesh: expected distinct dim_names, got \"dp\" more than once in \"dp\", "
            "\"dp\"; give every "
            "dimension its own name");
}

TEST_F(MeshErrors, EmptyName) {
  const auto world = fake_world(0, 4);
  EXPECT_EQ(message_of([] { DeviceMesh(at::kCPU, {0, 1}, {""}); }),
            "DeviceMesh: expected non-empty dim_names, got \"\"; name every dimension or none");
}

TEST_F(MeshErrors, UnknownNameListsTheKnownOnes) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = square();
  mesh.flatten("all");
  EXPECT_EQ(message_of([&] { mesh["pp"]; }),
            "DeviceMesh::operator[]: expected one of \"dp\", \"tp\", \"all\", got \"pp\"; these "
            "are the dimensions of "
            "DeviceMesh(cpu, dp=2 x tp=2, [[0, 1], [2, 3]])");
  EXPECT_EQ(message_of([&] { mesh["tp"]["all"]; }),
            "DeviceMesh::operator[]: expected one of \"tp\", got \"all\"; these are the dimensions "
            "of DeviceMesh(cpu, "
            "tp=2, [0, 1]), flattened ones are found in its root()");
  EXPECT_NE(message_of([&] { mesh.group("pp"); }).find("DeviceMesh::group: expected one of"),
            std::string::npos);
  EXPECT_NE(
      message_of([&] { mesh.local_rank("pp"); }).find("DeviceMesh::local_rank: expected one of"),
      std::string::npos);
}

TEST_F(MeshErrors, SliceWithoutNames) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
  EXPECT_EQ(message_of([&] { mesh["dp"]; }),
            "DeviceMesh::operator[]: expected a mesh with dim_names, got DeviceMesh(cpu, 2 x 2, "
            "[[0, 1], [2, 3]]) asked "
            "for \"dp\"; name the dimensions when you make the mesh");
}

TEST_F(MeshErrors, SliceToNothing) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = square();
  EXPECT_EQ(message_of([&] { mesh[Names()]; }),
            "DeviceMesh::operator[]: expected at least one dimension name, got none; ask for "
            "dimensions of "
            "DeviceMesh(cpu, dp=2 x tp=2, [[0, 1], [2, 3]])");
}

TEST_F(MeshErrors, SliceInAnotherOrder) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = square();
  EXPECT_EQ(message_of([&] { mesh[{"tp", "dp"}]; }),
            "DeviceMesh::operator[]: expected dimensions in the mesh's order, got \"tp\", \"dp\"; "
            "list them as in "
            "dim_names()");
}

TEST_F(MeshErrors, SliceWithOverlap) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = square();
  mesh.flatten("all");
  EXPECT_EQ(message_of([&] { mesh[{"all", "tp"}]; }),
            "DeviceMesh::operator[]: expected dimensions that do not overlap, got \"all\", \"tp\"; "
            "a dimension can be "
            "asked for once, by itself or inside a flattened one");
  EXPECT_NE(message_of([&] { mesh[{"tp", "tp"}]; }).find("do not overlap, got \"tp\", \"tp\""),
            std::string::npos);
}

TEST_F(MeshErrors, FlattenWithoutAnyName) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
  EXPECT_EQ(message_of([&] { mesh.flatten(); }),
            "DeviceMesh::flatten: expected a name, since DeviceMesh(cpu, 2 x 2, [[0, 1], [2, 3]]) "
            "has no dim_names to "
            "join, got none; pass one, e.g. flatten(\"all\")");
}

TEST_F(MeshErrors, FlattenToTheNameOfADimension) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = square();
  EXPECT_EQ(message_of([&] { mesh.flatten("dp"); }),
            "DeviceMesh::flatten: expected a name of its own, got \"dp\", which is a dimension of "
            "DeviceMesh(cpu, dp=2 x "
            "tp=2, [[0, 1], [2, 3]]); choose another name");
}

TEST_F(MeshErrors, FlattenOtherDimensionsToATakenName) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = square();
  mesh["tp"].flatten("flat");
  EXPECT_EQ(message_of([&] { mesh.flatten("flat"); }),
            "DeviceMesh::flatten: expected a name of its own, got \"flat\", which other dimensions "
            "were flattened to; "
            "choose another name");
}

TEST_F(MeshErrors, MeshDimOutOfRange) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = square();
  EXPECT_EQ(message_of([&] { mesh.size(2); }),
            "DeviceMesh::size: expected a mesh_dim from -2 to 1, got 2; the mesh has 2 dimensions");
  EXPECT_EQ(
      message_of([&] { mesh.group(-3); }),
      "DeviceMesh::group: expected a mesh_dim from -2 to 1, got -3; the mesh has 2 dimensions");
  EXPECT_EQ(
      message_of([&] { mesh["tp"].local_rank(1); }),
      "DeviceMesh::local_rank: expected a mesh_dim from -1 to 0, got 1; the mesh has 1 dimension");
}

TEST_F(MeshErrors, NoDimensionNamedOnAMeshOfSeveral) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = square();
  EXPECT_EQ(message_of([&] { mesh.group(); }),
            "DeviceMesh::group: expected a 1-D mesh when no mesh_dim is given, got DeviceMesh(cpu, "
            "dp=2 x tp=2, [[0, 1], "
            "[2, 3]]); pass a mesh_dim or slice the mesh first");
  EXPECT_NE(
      message_of([&] { mesh.local_rank(); }).find("DeviceMesh::local_rank: expected a 1-D mesh"),
      std::string::npos);
}

TEST_F(MeshErrors, GroupOrLocalRankOnARankOutside) {
  const auto world = fake_world(6, 8);
  const DeviceMesh mesh = square();
  EXPECT_EQ(message_of([&] { mesh.group("tp"); }),
            "DeviceMesh::group: expected a rank of the mesh, got rank 6, which is outside "
            "DeviceMesh(cpu, dp=2 x tp=2, "
            "[[0, 1], [2, 3]]); call it only where coordinate() has a value");
  EXPECT_NE(message_of([&] {
              mesh["tp"].group();
            }).find("got rank 6, which is outside DeviceMesh(cpu, tp=2, [0, 1])"),
            std::string::npos);
  EXPECT_NE(message_of([&] { mesh.local_rank(0); })
                .find("DeviceMesh::local_rank: expected a rank of the mesh, got rank "
                      "6"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera
