// Whole tensors become distributed: who sends what, and what must be equal on all ranks.
#include <tessera/nn.h>

#include "dtensor/placed.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Distributes the tensor of one rank; the others hold something else.
void expect_values_of_source(const DeviceMesh& mesh, const at::Tensor& whole,
                             const Placements& placements, int source) {
  bool is_source = true;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim)
    is_source = is_source && mesh.local_rank(dim) == source;
  const auto own = is_source ? whole : whole * 0 - 1;
  const auto tensor = distribute_tensor(own, mesh, placements, source);
  const auto label = c10::str(placements, " of ", whole.sizes(), " from ", source);
  expect_bitwise_equal(full_of(tensor), whole, label);
  const auto local = tensor.to_local();
  EXPECT_TRUE(local.is_contiguous()) << label;
  EXPECT_FALSE(local.is_alias_of(own)) << label;
}

TEST(DistributeOnThreads, GivesTheSourcesValuesForEveryPlacement) {
  for (const auto& shape : {MeshShape{3}, MeshShape{2, 2}, MeshShape{2, 3}}) {
    on_mesh(shape, [](const DeviceMesh& mesh) {
      for (const auto& sizes : {Sizes{7, 5}, Sizes{1, 6}, Sizes{0, 2}, Sizes{6, 6}}) {
        for (const auto& placements :
             combinations({Replicate(), Shard(0), Shard(1)}, static_cast<size_t>(mesh.ndim()))) {
          for (const int source : {0, 1})
            expect_values_of_source(mesh, numbered(sizes), placements, source);
        }
      }
      if (mesh.ndim() < 2) return;
      expect_values_of_source(mesh, numbered({7, 5}), {StridedShard(0, mesh.size(1)), Shard(0)}, 1);
      expect_values_of_source(mesh, numbered({7, 5}).t(), {Shard(0), Replicate()}, 1);
      expect_values_of_source(mesh, numbered({7, 5}), {Partial(), Shard(0)}, 1);
    });
  }
}

TEST(Distribute, WorksOverGloo) {
  run_processes(3,
                [] {
                  const auto mesh = init_device_mesh(torch::kCPU, {3});
                  for (const auto& sizes : {Sizes{7, 5}, Sizes{1, 6}, Sizes{4, 2}}) {
                    for (const auto& placement : {Replicate(), Shard(0), Shard(1)})
                      expect_values_of_source(mesh, numbered(sizes), {placement}, 1);
                  }
                },
                {.backend = "gloo"});
}

TEST(DistributeOnThreads, SendsEachRankItsPartAlone) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const comm_debug scope;
    distribute_tensor(numbered({6, 4}), mesh, {Shard(0)});
    EXPECT_EQ(scope.total(), 1) << scope.to_string();
    EXPECT_EQ(scope.counts().at("scatter").bytes, rank() == 0 ? 6 * 4 * 4 : 0);
  });
}

TEST(DistributeOnThreads, TensorsThatDifferInShapeOrDtypeAreAnError) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto message = [&](const at::Tensor& tensor) {
      return message_of([&] { distribute_tensor(tensor, mesh, {Shard(0), Replicate()}); });
    };
    EXPECT_THAT(message(numbered({rank() == 3 ? 5 : 4, 3})),
                AllOf(HasSubstr("distribute_tensor: the ranks disagree: rank "),
                      HasSubstr("[4, 3]"), HasSubstr("rank 3 passes sizes [5, 3]")));
    EXPECT_THAT(message(numbered({4, 3}).to(rank() == 1 ? torch::kDouble : torch::kFloat)),
                AllOf(HasSubstr("float32"), HasSubstr("float64")));
    EXPECT_THAT(message(rank() == 2 ? numbered({4, 3, 1}) : numbered({4, 3})),
                HasSubstr("rank 2 passes sizes [4, 3, 1] of float32"));
    expect_values_of_source(mesh, numbered({4, 3}), {Shard(0), Shard(1)}, 0);
  });
}

TEST(DistributeOnThreads, PlacementsAndSourcesThatDifferAreAnErrorOnAllRanks) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto tensor = numbered({4, 4});
    const auto mine = rank() == 3 ? Shard(1) : Shard(0);
    EXPECT_THAT(message_of([&] { distribute_tensor(tensor, mesh, {mine, Replicate()}); }),
                AllOf(HasSubstr("distribute_tensor: the ranks disagree: rank "),
                      HasSubstr(" as [Shard(0), Replicate()] from rank 0"),
                      HasSubstr("rank 3 passes sizes [4, 4] of float32 as [Shard(1), Replicate()] "
                                "from rank 0")));
    EXPECT_THAT(message_of([&] { distribute_tensor(tensor, mesh, {}, rank() == 0 ? 1 : 0); }),
                HasSubstr("from rank 1"));
    EXPECT_THAT(message_of([&] {
                  DTensor::from_local(tensor, mesh, {mine, Replicate()}, {.run_check = true});
                }),
                AllOf(HasSubstr("DTensor::from_local: the ranks disagree: rank "),
                      HasSubstr("rank 3 passes placements [Shard(1), Replicate()]")));
    expect_values_of_source(mesh, numbered({4, 3}), {Shard(0), Shard(1)}, 0);
  });
}

TEST(DistributeOnThreads, WaysThatDifferAreAnErrorOnAllRanks) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto partial = DTensor::from_local(numbered({4, 4}), mesh, {Partial()});
    EXPECT_THAT(message_of<c10::DistBackendError>([&] { partial.redistribute({Shard(rank())}); }),
                AllOf(HasSubstr("the ranks disagree: rank 0 calls reduce_scatter #"),
                      HasSubstr("Partial to Shard(0)"), HasSubstr("Partial to Shard(1)")));
  });
}

TEST(DistributeOnThreads, ModulesAreTakenAsHoldersToo) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto holder = distribute_module(nn::Linear(3, 2), mesh);
    EXPECT_TRUE(is_dtensor(holder->weight));
    auto shared = distribute_module(std::make_shared<torch::nn::LinearImpl>(3, 2), mesh);
    EXPECT_TRUE(is_dtensor(shared->weight));
    nn::Linear linear(3, 2);
    auto& same = distribute_module(*linear, mesh);
    EXPECT_EQ(&same, linear.get());
    comm_debug scope(linear);
    linear(DTensor::from_local(torch::ones({2, 3}), mesh, {Shard(0)}));
    EXPECT_EQ(scope.total(), 0);
  });
}

}  // namespace
}  // namespace tessera::testing
