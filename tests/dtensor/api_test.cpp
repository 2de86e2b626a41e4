// The class itself: in and out of it, modules, and what shows who holds what.
#include <tessera/nn.h>

#include "dtensor/placed.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

#include <sstream>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DTensorOnThreads, FromLocalAndToLocalShareMemory) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto local = torch::ones({2, 3});
    auto tensor = DTensor::from_local(local, mesh, {Shard(0)});
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef({4, 3}));
    tensor.mul_(2);
    expect_equal(local, torch::full({2, 3}, 2.0));
    tensor.to_local().add_(1);
    expect_equal(local, torch::full({2, 3}, 3.0));
    EXPECT_EQ(DTensor::from_local(local, mesh).placements(), Placements{Replicate()});
    EXPECT_EQ(DTensor::from_local(local, mesh, {Shard(-1)}).placements(), Placements{Shard(1)});
  });
}

TEST(DTensorOnThreads, RunCheckFindsUnevenSizesAndTakesTheFirstRanksValues) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({5, 2});
    const comm_debug scope;
    const auto rows = DTensor::from_local(part_by_hand(whole, mesh, {Shard(0)}), mesh, {Shard(0)},
                                          {.run_check = true});
    EXPECT_EQ(rows.sizes(), whole.sizes());
    expect_equal(rows.full_tensor(), whole);
    const auto same = DTensor::from_local(torch::full({2}, static_cast<double>(rank())), mesh, {},
                                          {.run_check = true});
    expect_equal(same.to_local(), torch::zeros({2}));
    auto leaf = torch::full({2}, static_cast<float>(rank()), torch::requires_grad());
    DTensor::from_local(leaf, mesh, {}, {.run_check = true}).sum().backward();
    expect_equal(leaf.grad(), torch::ones({2}));
  });
}

TEST(DTensorOnThreads, RunCheckThrowsOnAllRanks) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const auto from = [&](const at::Tensor& local, const Placement& placement) {
      return message_of(
          [&] { DTensor::from_local(local, mesh, {placement}, {.run_check = true}); });
    };
    const auto dtype = rank() == 1 ? torch::kDouble : torch::kFloat;
    EXPECT_THAT(
        from(torch::ones({2}, dtype), Shard(0)),
        AllOf(HasSubstr("DTensor::from_local: expected one dtype on all ranks, got float32"),
              HasSubstr("float64 on rank 1")));
    EXPECT_THAT(from(torch::ones({rank() == 2 ? 3 : 2}), Replicate()),
                HasSubstr("expected a part of sizes [2] on rank 2"));
    EXPECT_THAT(from(torch::ones({rank() == 0 ? 1 : 3}), Shard(0)),
                HasSubstr("expected a part of sizes [3] on rank 0"));
    expect_equal(all_reduce(torch::ones({1})), torch::full({1}, 3.0), "the ranks are in step");
  });
}

TEST(DTensorOnThreads, RunCheckThrowsInRowsOfTheMeshThatAgreeToo) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto local = torch::ones({rank() == 0 ? 1 : 2});
    EXPECT_THAT(message_of([&] {
                  DTensor::from_local(local, mesh, {Shard(0), Replicate()}, {.run_check = true});
                }),
                HasSubstr("DTensor::from_local: expected a part of sizes"));
    expect_equal(all_reduce(torch::ones({1})), torch::full({1}, 4.0), "the ranks are in step");
  });
}

TEST(DTensorOnThreads, FromLocalWithShapeAndStride) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const auto columns = numbered({3, 5}).t();  // dense, by columns
    const auto local = chunk_by_hand(columns, 0, 4, rank());
    const auto tensor =
        DTensor::from_local(local, mesh, {Shard(0)}, {.shape = Sizes{5, 3}, .stride = Sizes{1, 5}});
    EXPECT_EQ(tensor.strides(), at::IntArrayRef({1, 5}));
    expect_equal(tensor.full_tensor(), columns);
  });
}

TEST(DTensorOnThreads, GradientsOfFromLocal) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const auto weight = numbered({5, 3});
    const auto gradient = [&](const Placement& placement, std::optional<Placements> wanted) {
      auto local = part_by_hand(numbered({5, 3}), mesh, {placement}).requires_grad_();
      const auto tensor = DTensor::from_local(
          local, mesh, {placement},
          {.shape = Sizes{5, 3}, .stride = Sizes{3, 1}, .grad_placements = std::move(wanted)});
      (tensor * placed(weight, mesh, {Replicate()})).sum().backward();
      return local.grad();
    };
    expect_equal(gradient(Shard(0), {}), chunk_by_hand(weight, 0, 3, rank()));
    expect_equal(gradient(Shard(1), {}), chunk_by_hand(weight, 1, 3, rank()));
    expect_equal(gradient(Replicate(), {}), weight);
    expect_equal(gradient(Partial(), {}), weight, "the gradient of a summand is the sum's");
    expect_equal(gradient(Replicate(), Placements{Replicate()}), weight);
  });
}

TEST(DTensorOnThreads, GradientsOfToLocalAndFullTensor) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({5, 2});
    const auto own = static_cast<double>(rank() + 1);  // each rank has a loss of its own
    auto rows = placed(whole, mesh, {Shard(0)});
    rows.requires_grad_();
    (rows.to_local() * own).sum().backward();
    EXPECT_EQ(DTensor::of(rows.grad()).placements(), Placements{Shard(0)});
    expect_equal(DTensor::of(rows.grad()).to_local(),
                 torch::full_like(chunk_by_hand(whole, 0, 2, rank()), own));

    auto same = placed(whole, mesh, {Replicate()});
    same.requires_grad_();
    (same.to_local(Placements{Partial()}) * own).sum().backward();
    expect_equal(full_of(same.grad()), torch::full({5, 2}, 3.0), "local losses add up");

    auto gathered = placed(whole, mesh, {Shard(0)});
    gathered.requires_grad_();
    gathered.full_tensor().mul(2).sum().backward();
    EXPECT_EQ(DTensor::of(gathered.grad()).placements(), Placements{Shard(0)});
    expect_equal(full_of(gathered.grad()), torch::full({5, 2}, 2.0));
    gathered.mutable_grad() = at::Tensor();
    (gathered.full_tensor(Placements{Partial()}) * own).sum().backward();
    expect_equal(full_of(gathered.grad()), torch::full({5, 2}, 3.0));
  });
}

TEST(DTensorOnThreads, DistributeTensorTakesTheSourcesValues) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto mine = numbered({5, 3}) + rank();
    const Placements rows_and_columns{Shard(0), Shard(1)};
    const auto from_first = distribute_tensor(mine, mesh, rows_and_columns);
    expect_equal(from_first.to_local(), part_by_hand(numbered({5, 3}), mesh, rows_and_columns));
    const auto from_last = distribute_tensor(mine, mesh, {Shard(0), Shard(0)}, 1);
    expect_equal(from_last.full_tensor(), numbered({5, 3}) + 3);
    const comm_debug scope;
    const auto own = distribute_tensor(mine, mesh, rows_and_columns, std::nullopt);
    EXPECT_EQ(scope.total(), 0);
    expect_equal(own.to_local(), part_by_hand(mine, mesh, rows_and_columns));
    const auto copy = distribute_tensor(mine, mesh, {}, std::nullopt);
    EXPECT_FALSE(copy.to_local().is_alias_of(mine));
    EXPECT_EQ(copy.placements(), Placements(2));
    const auto leaf = torch::ones({4}, torch::requires_grad());
    EXPECT_TRUE(distribute_tensor(leaf, mesh).requires_grad());
    EXPECT_FALSE(is_dtensor(leaf));
  });
}

TEST(DTensorOnThreads, DistributeTensorInPlaceKeepsIdentityAndGradient) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Linear layer(4, 6);
    const auto held = layer->weight;  // as an optimizer would
    {
      const at::NoGradGuard no_grad;
      layer->weight.copy_(numbered({6, 4}));
    }
    layer->weight.mutable_grad() = numbered({6, 4}) * 2;
    distribute_tensor_(layer->weight, mesh, {Shard(0)});
    EXPECT_TRUE(is_dtensor(layer->weight));
    EXPECT_TRUE(held.is_same(layer->weight));
    EXPECT_TRUE(layer->parameters()[0].is_same(layer->weight));
    EXPECT_TRUE(is_dtensor(layer->named_parameters()["weight"]));
    EXPECT_TRUE(held.is_leaf() && held.requires_grad());
    EXPECT_EQ(held.sizes(), at::IntArrayRef({6, 4}));
    expect_equal(full_of(held), numbered({6, 4}));
    EXPECT_EQ(DTensor::of(held.grad()).placements(), Placements{Shard(0)});
    expect_equal(full_of(held.grad()), numbered({6, 4}) * 2);
  });
}

TEST(DTensorOnThreads, DistributeModule) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Sequential net;
    net->push_back("first", nn::Linear(4, 6));
    net->push_back("norm", nn::BatchNorm1d(6));
    const auto partition = [](const std::string& name, torch::nn::Module& module,
                              const DeviceMesh& mesh) {
      if (name == "first")
        distribute_tensor_(module.named_parameters()["weight"], mesh, {Shard(0)});
    };
    distribute_module(
        *net, mesh, partition,
        [](torch::nn::Module&, nn::Arguments& arguments, const DeviceMesh& mesh) {
          arguments.tensor(0) = DTensor::from_local(arguments.tensor(0), mesh, {Shard(0)});
        },
        [](torch::nn::Module&, nn::Result& result, const DeviceMesh&) {
          result.tensor() = DTensor::of(result.tensor()).redistribute({Shard(0)}).to_local();
        });
    for (const auto& item : net->named_parameters()) {
      ASSERT_TRUE(is_dtensor(item.value())) << item.key();
      EXPECT_EQ(DTensor::of(item.value()).placements(),
                Placements{item.key() == "first.weight" ? Shard(0) : Replicate()});
    }
    for (const auto& item : net->named_buffers())
      EXPECT_TRUE(is_dtensor(item.value())) << item.key();
    const auto result = net->forward(numbered({3, 4}));
    EXPECT_FALSE(is_dtensor(result));
    EXPECT_EQ(result.sizes(), at::IntArrayRef({3, 6}));
    EXPECT_THAT(message_of<c10::Error>([&] { distribute_module(*net, mesh); }),
                HasSubstr("already has distribute_module applied"));
  });
}

TEST(DTensorOnThreads, Factories) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    for (const auto& placement : {Replicate(), Shard(0), Shard(1)}) {
      const auto whole = torch::ones({4, 2});
      expect_equal(dtensor::ones({4, 2}, mesh, {placement}).full_tensor(), whole);
      expect_equal(dtensor::zeros({4, 2}, mesh, {placement}).full_tensor(), whole * 0);
      expect_equal(dtensor::full({4, 2}, 2.5, mesh, {placement}).full_tensor(), whole * 2.5);
      const auto empty = dtensor::empty({4, 2}, mesh, {placement}, torch::dtype(torch::kLong));
      EXPECT_EQ(empty.to_local().sizes(), part_by_hand(whole, mesh, {placement}).sizes());
      EXPECT_EQ(empty.dtype(), torch::kLong);
    }
    const auto leaf = dtensor::zeros({2}, mesh, {}, torch::requires_grad());
    EXPECT_TRUE(leaf.requires_grad() && leaf.is_leaf());
  });
}

TEST(DTensorOnThreads, RanksOutsideOfTheMeshHoldNothing) {
  run_threads(3,
              [] {
                const DeviceMesh mesh(torch::kCPU, {0, 1});
                const auto tensor = distribute_tensor(numbered({4, 2}), mesh, {Shard(0)});
                EXPECT_EQ(tensor.sizes(), at::IntArrayRef({4, 2}));
                const auto sum = DTensor::of(tensor + tensor);
                EXPECT_EQ(sum.sizes(), at::IntArrayRef({4, 2}));
                EXPECT_EQ(sum.to_local().numel(), rank() == 2 ? 0 : 4);
              },
              {.backend = "shm"});
}

TEST(DTensorOnThreads, PrintsWhatItIs) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    std::ostringstream out;
    out << placed(torch::full({3, 2}, 7.0), mesh, {Shard(0)});
    EXPECT_THAT(out.str(), AllOf(HasSubstr("DTensor([3, 2], float32, DeviceMesh("),
                                 HasSubstr("[Shard(0)]"), HasSubstr(" 7  7")));
    EXPECT_EQ(c10::str(Placements{Replicate(), Partial("max"), StridedShard(1, 2)}),
              "[Replicate(), Partial(max), StridedShard(1, 2)]");
  });
}

TEST(DTensorOnThreads, ShardsAndTheirPicture) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto tensor = placed(numbered({3, 4}), mesh, {Shard(0), Shard(1)});
    const auto shards = tensor.shards();
    ASSERT_EQ(shards.size(), 4U);
    EXPECT_EQ(shards[3].offset, (std::vector<int64_t>{2, 2}));
    EXPECT_EQ(shards[3].length, (std::vector<int64_t>{1, 2}));
    EXPECT_EQ(shards[3].owner, 3);
    EXPECT_EQ(visualize_sharding(tensor),
              "ranks of each block, [3, 4] [Shard(0), Shard(1)]\n"
              "rows    0:2     2:4     \n"
              "0:2     0       1       \n"
              "2:3     2       3       \n");
    EXPECT_EQ(visualize_sharding(placed(numbered({1}), mesh, {Replicate(), Shard(0)})),
              "ranks of each block, [1] [Replicate(), Shard(0)]\n"
              "        0:1     \n"
              "        0,2     \n");
  });
}

struct GatherRowsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return DTensor::of(x).redistribute({Replicate()}); }
};
TESSERA_MODULE(GatherRows);

struct OuterImpl : torch::nn::Module {
  GatherRows rows{register_module("rows", GatherRows())};
  at::Tensor forward(const at::Tensor& x) {
    rows(x);
    return DTensor::of(x).redistribute({Shard(1)});
  }
};
TESSERA_MODULE(Outer);

TEST(DTensorOnThreads, CommDebugCountsByModule) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Outer net;
    const auto tensor = placed(numbered({4, 4}), mesh, {Shard(0)});
    comm_debug all;
    {
      const comm_debug scope(*net);
      net(tensor);
      EXPECT_EQ(scope.total(), 2);
      EXPECT_EQ(scope.counts_by_module().at("rows").at("all_gather").collectives, 1);
      EXPECT_EQ(scope.counts_by_module().at("rows").at("all_gather").bytes, 32);
      EXPECT_EQ(scope.counts_by_module().at("rows").size(), 1U);
      EXPECT_EQ(scope.counts_by_module().at("").at("all_to_all").collectives, 1);
      EXPECT_THAT(scope.to_string(), AllOf(HasSubstr("rows"), HasSubstr("all_gather")));
    }
    net(tensor);
    EXPECT_EQ(all.total(), 4) << "the outer scope counts too";
    all.reset();
    EXPECT_EQ(all.total(), 0);
  });
}

}  // namespace
}  // namespace tessera::testing
