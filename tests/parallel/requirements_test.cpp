// REQUIREMENTS.md 1.4, test by test.
#include "compose/on_device.h"
#include "parallel/models.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <numeric>

namespace tessera::testing {
namespace {

constexpr int kRanks = 4;

ColwiseParallel to_all() { return ColwiseParallel({.output_layouts = Replicate()}); }

class ParallelizeOn : public OnBackends {
 protected:
  void run(const RankBody& body) { OnBackends::run(kRanks, body); }
};
INSTANTIATE_TEST_SUITE_P(Every, ParallelizeOn, ::testing::ValuesIn(cpu_backends()), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, ParallelizeOn, ::testing::ValuesIn(cuda_backends()), backend_name);

DeviceMesh mesh_of_list() {
  std::vector<int64_t> ranks(world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return {run_device().type(), ranks};
}

TEST_P(ParallelizeOn, R_004_1_LinearRowWise) {
  run([] {
    torch::manual_seed(5);
    auto plain = on_device(nn::Linear(16, 10));
    auto parallel = clone_module(plain);
    parallelize_module(parallel, mesh_of_list(), RowwiseParallel());
    EXPECT_EQ(DTensor::of(parallel->weight).placements(), Placements{Shard(1)});
    EXPECT_EQ(DTensor::of(parallel->bias).placements(), Placements{Replicate()});
    torch::manual_seed(rank());
    expect_equal_modules(plain, parallel, {9, 16}, /*rowwise=*/true);
  });
}

TEST_P(ParallelizeOn, R_004_2_LinearColWise) {
  run([] {
    torch::manual_seed(5);
    auto plain = on_device(nn::Linear(10, 16));
    auto parallel = clone_module(plain);
    parallelize_module(parallel, mesh_of_list(), to_all());
    EXPECT_EQ(DTensor::of(parallel->weight).placements(), Placements{Shard(0)});
    EXPECT_EQ(DTensor::of(parallel->bias).placements(), Placements{Shard(0)});
    expect_equal_modules(plain, parallel, {8, 10});
  });
}

TEST_P(ParallelizeOn, R_004_3_PrepareModuleInput) {
  run([] {
    Dummy module;
    const auto mesh = mesh_of_list();
    parallelize_module(
        module, mesh,
        PrepareModuleInput({.input_layouts = Shard(0), .desired_input_layouts = Replicate()}));
    torch::manual_seed(rank());
    const auto own = torch::rand({5, 7}, run_device());
    const auto output = DTensor::of(module(own));
    EXPECT_EQ(output.sizes(), at::IntArrayRef({5 * kRanks, 7}));
    EXPECT_EQ(output.placements(), Placements{Replicate()});
    EXPECT_TRUE(at::equal(output.redistribute({Shard(0)}).to_local(), own));
    EXPECT_TRUE(at::equal(output.to_local(), all_gather(own, 0))) << "rows of every rank, in order";
  });
}

TEST_P(ParallelizeOn, R_004_4_PrepareModuleOutput) {
  run([] {
    Dummy module;
    const auto mesh = mesh_of_list();
    parallelize_module(
        module, mesh,
        PrepareModuleOutput({.output_layouts = Replicate(), .desired_output_layouts = Shard(0)}));
    torch::manual_seed(15);
    const auto x = torch::rand({16, 7}, run_device());
    const auto distributed = DTensor::from_local(x, mesh, {Replicate()});
    const auto output = module(distributed);
    EXPECT_FALSE(is_dtensor(output));
    EXPECT_EQ(output.size(0), 4);
    EXPECT_TRUE(at::equal(output, distributed.redistribute({Shard(0)}).to_local()));
    EXPECT_TRUE(at::equal(output, x.slice(0, 4 * rank(), 4 * rank() + 4)));
  });
}

void expect_plan_trains_mlp(const ParallelPlan& plan) {
  auto plain = on_device(MlpModule());
  auto parallel = clone_module(plain);
  parallelize_module(parallel, mesh_of_all(run_device().type()), plan);
  ASSERT_TRUE(is_dtensor(parallel->net1->weight)) << "of the plan's patterns";
  EXPECT_EQ(DTensor::of(parallel->net1->weight).placements(), Placements{Shard(0)});
  EXPECT_EQ(DTensor::of(parallel->net2->weight).shards()[3].length[0], 1) << "10 rows: 3, 3, 3, 1";
  expect_equal_modules(plain, parallel, {12, 10});
}

TEST_P(ParallelizeOn, R_004_5_Star) {
  run([] { expect_plan_trains_mlp({{"net*", to_all()}}); });
}

TEST_P(ParallelizeOn, R_004_6_QuestionMark) {
  run([] { expect_plan_trains_mlp({{"net?", to_all()}}); });
}

TEST_P(ParallelizeOn, R_004_7_Digit) {
  run([] { expect_plan_trains_mlp({{"net[1-2]", to_all()}}); });
}

TEST_P(ParallelizeOn, R_004_8_SeveralWildcards) {
  run([] {
    auto plain = on_device(MlpStacked(2));
    auto parallel = clone_module(plain);
    parallelize_module(
        parallel, mesh_of_all(run_device().type()),
        {{"layers.*.net[1]", ColwiseParallel()}, {"layers.*.net[2]", RowwiseParallel()}});
    for (const auto& part : *parallel->layers) {
      auto& mlp = *part->as<MlpModule>();
      EXPECT_EQ(DTensor::of(mlp.net1->weight).placements(), Placements{Shard(0)});
      EXPECT_EQ(DTensor::of(mlp.net2->weight).placements(), Placements{Shard(1)});
    }
    // Between the two: plain and local.
    auto& first = *parallel->layers->ptr(0)->as<MlpModule>();
    int calls = 0;
    auto handle = register_forward_hook(first.relu, [&](auto&, auto& arguments, auto&) {
      ++calls;
      EXPECT_FALSE(is_dtensor(arguments.tensor(0)));
      EXPECT_EQ(arguments.tensor(0).sizes(), at::IntArrayRef({12, 4}));
    });
    expect_equal_modules(plain, parallel, {12, 10});
    EXPECT_GE(calls, 1);
  });
}

TEST_P(ParallelizeOn, R_004_9_MlpByNames) {
  run([] { expect_plan_trains_mlp({{"net1", to_all()}, {"net2", to_all()}}); });
}

TEST_P(ParallelizeOn, R_004_10_MlpNested) {
  run([] {
    const auto make = [] {
      nn::Sequential stack;
      stack->push_back("dummy_encoder", MlpModule());
      return on_device(stack);
    };
    auto plain = make();
    auto parallel = make();
    parallelize_module(parallel, mesh_of_all(run_device().type()),
                       {{"dummy_encoder.net1", to_all()}, {"dummy_encoder.net2", to_all()}});
    EXPECT_TRUE(is_dtensor(get_parameter(parallel, "dummy_encoder.net1.weight")));
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.25);
    torch::optim::SGD parallel_optimizer(parallel->parameters(), 0.25);
    torch::manual_seed(0);
    const auto x = torch::rand({12, 10}, run_device());
    const auto expected = plain->forward(x);
    const auto output = parallel->forward(x);
    expect_equal(full_value(output), expected, "output");
    expected.sum().backward();
    output.sum().backward();
    expect_equal_parameters(*plain, *parallel, Compared::Gradients);
    plain_optimizer.step();
    parallel_optimizer.step();
    expect_equal_parameters(*plain, *parallel, Compared::Parameters);
  });
}

TEST_P(ParallelizeOn, ColumnThenRowCommunicatesOnceEachWay) {
  run([] {
    auto net = on_device(MlpModule());
    parallelize_module(net, mesh_of_all(run_device().type()),
                       {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    auto x = torch::rand({12, 10}, run_device()).requires_grad_();
    net(x).sum().backward();
    comm_debug counted;
    const auto y = net(x);
    EXPECT_EQ(counted.total(), 1) << counted.to_string();
    EXPECT_EQ(counted.counts().at("all_reduce").collectives, 1);
    y.sum().backward();
    EXPECT_EQ(counted.total(), 2) << counted.to_string();
    EXPECT_EQ(counted.counts().at("all_reduce").collectives, 2);
  });
}

TEST_P(ParallelizeOn, ValuesOfTheSourceRankCount) {
  run([] {
    const auto built = [] {
      torch::manual_seed(100 + rank());
      return on_device(nn::Linear(6, 8));
    };
    const auto mesh = mesh_of_all(run_device().type());
    for (const int source : {0, 2}) {
      auto net = built();
      const auto expected = broadcast(net->weight.detach(), source);
      parallelize_module(net, mesh, ColwiseParallel(), {.src_data_rank = source});
      EXPECT_TRUE(at::equal(DTensor::of(net->weight).full_tensor().detach(), expected));
    }
    auto net = built();
    const auto own = net->weight.detach().clone();
    comm_debug counted;
    parallelize_module(net, mesh, ColwiseParallel(), {.src_data_rank = std::nullopt});
    EXPECT_EQ(counted.total(), 0);
    EXPECT_TRUE(at::equal(DTensor::of(net->weight).to_local().detach(),
                          own.slice(0, 2 * rank(), 2 * rank() + 2)));
  });
}

}  // namespace
}  // namespace tessera::testing
