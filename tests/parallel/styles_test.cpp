// Styles one by one.
#include <tessera/checkpoint.h>

#include "parallel/models.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

constexpr int kStyleRanks = 4;

/// Equal outputs for these inputs, and equal gradients.
template <class M>
void expect_equal_calls(M& plain, M& parallel, const at::Tensor& x, const at::Tensor& own_x) {
  const auto expected = plain(x);
  const auto output = parallel(own_x);
  expect_equal(full_value(output), expected, "output");
  const auto weights = torch::linspace(-1, 2, expected.numel()).view(expected.sizes());
  (expected * weights).sum().backward();
  (full_value(output) * weights).sum().backward();
  expect_equal_parameters(*plain, *parallel, Compared::Gradients);
}

struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl(int64_t in, int64_t hidden, int64_t out)
      : up(register_module("up", nn::Linear(in, hidden))),
        down(register_module("down", nn::Linear(hidden, out))) {}
  at::Tensor forward(const at::Tensor& x) { return down(up(x).relu()); }
  nn::Linear up, down;
};
TESSERA_MODULE(TwoLayers);

TEST(Styles, EmbeddingByColumnsAndByRows) {
  run_processes(kStyleRanks, [] {
    const auto mesh = mesh_of_all();
    torch::manual_seed(7);
    const auto tokens = torch::randint(11, {3, 8}, torch::kLong);
    {
      auto [plain, parallel] = twins<nn::Embedding>(1, 11, 6);
      parallelize_module(parallel, mesh, ColwiseParallel({.output_layouts = Replicate()}));
      EXPECT_EQ(DTensor::of(parallel->weight).placements(), Placements{Shard(1)});
      expect_equal_calls(plain, parallel, tokens, tokens);
    }
    {
      auto [plain, parallel] = twins<nn::Embedding>(2, 11, 6);
      parallelize_module(parallel, mesh, RowwiseParallel());
      EXPECT_EQ(DTensor::of(parallel->weight).placements(), Placements{Shard(0)});
      expect_equal_calls(plain, parallel, tokens, tokens);
    }
    {
      auto [plain, parallel] = twins<nn::Embedding>(3, 11, 6);
      parallelize_module(parallel, mesh,
                         RowwiseParallel({.input_layouts = Replicate(),
                                          .output_layouts = Shard(1),
                                          .use_local_output = false}));
      EXPECT_EQ(DTensor::of(parallel(tokens)).placements(), Placements{Shard(1)});
      expect_equal_calls(plain, parallel, tokens, tokens);
    }
  });
}

TEST(Styles, RowwiseTakesUnevenColumns) {
  run_processes(kStyleRanks, [] {
    // 10 columns: 3, 3, 3 and 1 on the ranks, as ColwiseParallel leaves them.
    auto [plain, parallel] = twins<TwoLayers>(4, 5, 10, 3);
    parallelize_module(parallel, mesh_of_all(),
                       {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    const auto x = torch::linspace(0, 1, 20).view({4, 5});
    expect_equal(full_value(parallel(x)), plain(x), "output");
    parallel(x).square().sum().backward();
    plain(x).square().sum().backward();
    expect_equal_parameters(*plain, *parallel, Compared::Gradients);
  });
}

TEST(Styles, RowwiseScattersAndColumnsGather) {
  run_processes(kStyleRanks, [] {
    auto [plain, parallel] = twins<TwoLayers>(4, 6, 8, 6);
    parallelize_module(parallel, mesh_of_all(),
                       {{"up", ColwiseParallel({.input_layouts = Shard(1)})},
                        {"down", RowwiseParallel({.output_layouts = Shard(1)})}});
    torch::manual_seed(3);
    auto x = torch::rand({2, 12, 6});
    auto own = x.slice(1, 3 * rank(), 3 * rank() + 3).detach().requires_grad_();
    x.requires_grad_();
    comm_debug counted;
    const auto output = parallel(own);
    EXPECT_EQ(counted.counts().at("all_gather").collectives, 1) << counted.to_string();
    EXPECT_EQ(counted.counts().at("reduce_scatter").collectives, 1) << counted.to_string();
    EXPECT_EQ(counted.total(), 2) << counted.to_string();
    const auto expected = plain(x);
    expect_equal(output, expected.slice(1, 3 * rank(), 3 * rank() + 3), "output");
    output.square().sum().backward();
    expected.square().sum().backward();
    expect_equal(own.grad(), x.grad().slice(1, 3 * rank(), 3 * rank() + 3), "input's gradient");
    expect_equal_parameters(*plain, *parallel, Compared::Gradients);
  });
}

TEST(Styles, SequenceParallelNorm) {
  run_processes(kStyleRanks, [] {
    auto [plain, parallel] = twins<nn::LayerNorm>(4, torch::nn::LayerNormOptions({6}));
    for (const auto& norm : {plain, parallel}) {
      const at::NoGradGuard no_grad;
      norm->weight.copy_(torch::linspace(0.5, 2, 6));
      norm->bias.copy_(torch::linspace(-1, 1, 6));
    }
    comm_debug counted;
    parallelize_module(parallel, mesh_of_all(), SequenceParallel());
    EXPECT_EQ(counted.total(), 0) << "replicated without communication";
    torch::manual_seed(3);
    const auto x = torch::rand({2, 12, 6});
    const auto output = DTensor::of(parallel(x.slice(1, 3 * rank(), 3 * rank() + 3)));
    EXPECT_EQ(output.placements(), Placements{Shard(1)});
    EXPECT_EQ(counted.total(), 0);
    const auto expected = plain(x);
    expect_equal(output.full_tensor(), expected, "output");
    const auto weights = torch::linspace(-1, 2, expected.numel()).view(expected.sizes());
    (expected * weights).sum().backward();
    (output.full_tensor() * weights).sum().backward();
    expect_equal_parameters(*plain, *parallel, Compared::Gradients);

    nn::Dropout dropout(0.5);
    parallelize_module(dropout, mesh_of_all(),
                       SequenceParallel({.sequence_dim = 0, .use_local_output = true}));
    EXPECT_EQ(dropout(torch::ones({3, 2})).sizes(), at::IntArrayRef({3, 2}));
  });
}

/// What torch::nn lacks.
struct RmsNormImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return at::rms_norm(x, {6}, weight, 1e-5); }
  at::Tensor weight = register_parameter("weight", torch::linspace(0.5, 2, 6));
};
TESSERA_MODULE(RmsNorm);

TEST(Styles, SequenceParallelNormOfOnesOwn) {
  run_processes(kStyleRanks, [] {
    auto [plain, parallel] = twins<RmsNorm>(4);
    parallelize_module(parallel, mesh_of_all(), SequenceParallel());
    torch::manual_seed(3);
    const auto x = torch::rand({2, 12, 6});
    const auto output = DTensor::of(parallel(x.slice(1, 3 * rank(), 3 * rank() + 3)));
    EXPECT_EQ(output.placements(), Placements{Shard(1)});
    const auto expected = plain(x);
    expect_equal(output.full_tensor(), expected, "output");
    expected.square().sum().backward();
    output.full_tensor().square().sum().backward();
    expect_equal_parameters(*plain, *parallel, Compared::Gradients);
  });
}

struct AttendImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, int64_t factor, const std::optional<at::Tensor>& mask) {
    seen = {x, mask.value_or(at::Tensor())};
    return (mask ? x * *mask : x) * factor;
  }
  std::vector<at::Tensor> seen;
};
TESSERA_MODULE(Attend, "x", "factor", "mask");

TEST(Styles, PrepareModuleInputByPositionAndName) {
  run_processes(2, [] {
    const auto mesh = mesh_of_all();
    const auto own = torch::full({2, 3}, rank() + 1.0);
    const auto all = all_gather(own, 0);
    const std::optional<at::Tensor> mask = own;
    {
      Attend net;
      parallelize_module(
          net, mesh,
          PrepareModuleInput({.input_layouts = {Shard(0), std::nullopt, Shard(0)},
                              .desired_input_layouts = {Replicate(), std::nullopt, Shard(0)}}));
      const auto result = net(own, 2, mask);
      EXPECT_EQ(DTensor::of(net->seen[0]).placements(), Placements{Replicate()});
      EXPECT_EQ(DTensor::of(net->seen[1]).placements(), Placements{Shard(0)});
      expect_equal(full_value(result), all * all * 2);
      EXPECT_FALSE(net(own, 2, std::nullopt).sum().isnan().item<bool>()) << "nothing to place";
    }
    {
      Attend net;
      parallelize_module(
          net, mesh,
          PrepareModuleInput(
              {.input_kwarg_layouts = {{"mask", Shard(0)}, {"x", Shard(0)}},
               .desired_input_kwarg_layouts = {{"mask", Replicate()}, {"x", Replicate()}},
               .use_local_output = true}));
      expect_equal(net(own, 3, mask), all * all * 3);
      EXPECT_FALSE(is_dtensor(net->seen[0]));
    }
    {
      Attend net;
      parallelize_module(net, mesh,
                         PrepareModuleInput({.input_layouts = {Shard(0), std::nullopt},
                                             .desired_input_layouts = {Replicate(), std::nullopt},
                                             .input_kwarg_layouts = {{"mask", Shard(0)}},
                                             .desired_input_kwarg_layouts = {{"mask", Replicate()}},
                                             .use_local_output = true}));
      expect_equal(net(own, 3, mask), all * all * 3);
      // A distributed argument knows its placement.
      expect_equal(net(DTensor::from_local(all, mesh, {Replicate()}), 3, mask), all * all * 3);
    }
  });
}

struct SplitImpl : torch::nn::Module {
  std::tuple<at::Tensor, int64_t, at::Tensor> forward(const at::Tensor& x) { return {x, 7, x + 1}; }
};
TESSERA_MODULE(Split);

TEST(Styles, PrepareModuleOutputOfSeveral) {
  run_processes(2, [] {
    Split net;
    parallelize_module(
        net, mesh_of_all(),
        PrepareModuleInputOutput({.input_layouts = Shard(0),
                                  .desired_input_layouts = Replicate(),
                                  .use_local_input = true,
                                  .output_layouts = {Replicate(), std::nullopt},
                                  .desired_output_layouts = {Shard(1), std::nullopt}}));
    const auto own = torch::arange(8.0).view({2, 4}) + 100 * rank();
    const auto [first, number, second] = net(own);
    const auto all = all_gather(own, 0);
    EXPECT_TRUE(at::equal(first, all.slice(1, 2 * rank(), 2 * rank() + 2)));
    EXPECT_EQ(number, 7);
    EXPECT_TRUE(at::equal(second, all + 1));
  });
}

/// Takes the bias along by itself.
class BiasAlone final : public ParallelStyle {
 public:
  void apply(const StyleTarget& target) const override {
    distribute_tensor_(get_parameter(target.module, "weight"), target.mesh, {Replicate()},
                       target.src_data_rank);
    distribute_tensor_(get_parameter(target.module, "bias"), target.mesh, {Shard(0)},
                       target.src_data_rank);
    register_forward_pre_hook(target.module, [mesh = target.mesh](auto&, auto& arguments) {
      arguments.tensor(0) = DTensor::from_local(arguments.tensor(0), mesh);
    });
  }
};

TEST(Styles, StylesOfOnesOwn) {
  run_processes(2, [] {
    auto [plain, parallel] = twins<MlpModule>(8);
    parallelize_module(parallel, mesh_of_all(), {{"net?", BiasAlone()}});
    const auto x = torch::rand({3, 10});
    // The second layer gets what the first gave, which is distributed.
    EXPECT_THROW(parallel(x), c10::Error);
    expect_equal(full_value(parallel->net1(x)), plain->net1(x));
  });
}

TEST(Styles, OptimizersMadeBeforeGoOnWorking) {
  run_processes(2, [] {
    auto [plain, parallel] = twins<MlpModule>(8);
    torch::optim::Adam plain_optimizer(plain->parameters(), 1e-2);
    torch::optim::Adam parallel_optimizer(parallel->parameters(), 1e-2);
    const auto names = parallel->named_parameters().keys();
    parallelize_module(parallel, mesh_of_all(),
                       {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    EXPECT_EQ(parallel->named_parameters().keys(), names);
    for (int step = 0; step < 3; ++step) {
      const auto x = torch::rand({3, 10});
      for (auto* net : {&plain, &parallel}) (*net)(x).square().sum().backward();
      plain_optimizer.step();
      parallel_optimizer.step();
      plain_optimizer.zero_grad();
      parallel_optimizer.zero_grad();
    }
    expect_equal_parameters(*plain, *parallel, Compared::Parameters);
  });
}

TEST(Styles, CheckpointedModules) {
  run_processes(2, [] {
    auto [plain, parallel] = twins<MlpModule>(8);
    parallelize_module(parallel, mesh_of_all(),
                       {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    checkpoint(parallel->net1);
    checkpoint(parallel);
    const auto x = torch::rand({3, 10});
    for (auto* net : {&plain, &parallel}) (*net)(x).square().sum().backward();
    expect_equal_parameters(*plain, *parallel, Compared::Gradients);
  });
}

TEST(StylesOnThreads, TrainTogether) {
  run_threads(3, [] {
    auto [plain, parallel] = twins<MlpModule>(8);
    parallelize_module(parallel, mesh_of_all(),
                       {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    const auto x = torch::linspace(0, 1, 60).view({6, 10});
    for (auto* net : {&plain, &parallel}) (*net)(x).square().sum().backward();
    expect_equal_parameters(*plain, *parallel, Compared::Gradients);
  });
}

}  // namespace
}  // namespace tessera::testing
