// A compiled step of a replicated module averages as the step itself does.
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "compiler/programs/agreement.h"
#include "step_parity.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;

struct MlpImpl : torch::nn::Module {
  tnn::Linear first{10, 16}, second{16, 4};
  MlpImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  torch::Tensor forward(torch::Tensor x) { return second(torch::relu(first(x))); }
};
TESSERA_MODULE(Mlp);

class ReplicatedStepRanks : public ::testing::TestWithParam<std::string> {
 protected:
  void run(const RankBody& body, int ranks = 2) {
    run_processes(ranks, body, {.backend = GetParam()});
  }
};
INSTANTIATE_TEST_SUITE_P(Every, ReplicatedStepRanks, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

void expect_parity_of(const std::function<void(Mlp&)>& prepare,
                      const std::function<void(Mlp&, int)>& before_step = {}) {
  expect_step_parity<Mlp>(
      {.prepare = prepare, .outputs = 4, .steps = 9, .before_step = before_step});
}

void expect_equal_gradients(Mlp& compiled, Mlp& eager, int step) {
  const auto got = compiled->parameters(), wanted = eager->parameters();
  for (size_t k = 0; k < got.size(); ++k)
    EXPECT_TRUE(torch::allclose(got[k].grad(), wanted[k].grad(), 1e-5, 1e-5)) << step << " " << k;
}

/// How many collectives of a program send tensors of this dtype.
int sends_of_dtype(const Graph& graph, torch::ScalarType dtype) {
  return static_cast<int>(
      std::count_if(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
        return node.op.starts_with("_c10d_functional::all_reduce") &&
               graph.type(node.used().front()).dtype == dtype;
      }));
}

TEST_P(ReplicatedStepRanks, TrainsLikeTheStep) {
  run([] { expect_parity_of([](Mlp& net) { replicate(net); }); });
}

TEST_P(ReplicatedStepRanks, TrainsLikeTheStepThatAveragesNowAndThen) {
  run([] {
    expect_parity_of([](Mlp& net) { replicate(net); },
                     [](Mlp& net, int i) { set_requires_gradient_sync(net, i % 2 == 0); });
  });
}

TEST_P(ReplicatedStepRanks, TrainsLikeTheStepWithACommHook) {
  run([] {
    expect_parity_of([](Mlp& net) {
      replicate(net);
      register_comm_hook(net, bf16_compress_hook);
    });
  });
}

/// Averages of a hook are buckets as others are.
TEST_P(ReplicatedStepRanks, BucketsWhatACommHookSends) {
  run([] {
    Mlp net;
    replicate(net);
    register_comm_hook(net, fp16_compress_hook);
    auto step = compile([&](torch::Tensor x) { net(x).sum().backward(); }, {.fullgraph = true});
    for (int i = 0; i < 4; ++i) {
      net->zero_grad();
      step(torch::ones({2, 10}));
    }
    EXPECT_EQ(counters()["ddp_buckets"], 1);
    EXPECT_EQ(sends_of_dtype(*step.step().graph(), torch::kHalf), 1) << *step.step().graph();
  });
}

/// The option does what the hook does.
TEST_P(ReplicatedStepRanks, CompressesGradients) {
  run([] {
    Mlp nets[2];
    for (auto& net : nets) {
      torch::manual_seed(3);
      net = Mlp();
      replicate(net);
    }
    register_comm_hook(nets[0], bf16_compress_hook);
    auto step = compile([&](torch::Tensor x) { nets[1](x).square().sum().backward(); },
                        {.fullgraph = true, .compress_gradients = torch::kBFloat16});
    for (int i = 0; i < 5; ++i) {
      torch::manual_seed(10 * i + rank());
      const auto x = torch::randn({4, 10});
      for (auto& net : nets) net->zero_grad();
      nets[0](x).square().sum().backward();
      step(x);
      const auto got = nets[1]->parameters(), wanted = nets[0]->parameters();
      // The first calls, which are recorded, average as they are.
      for (size_t k = 0; k < got.size(); ++k)
        EXPECT_TRUE(torch::allclose(got[k].grad(), wanted[k].grad(), 2e-2, 1e-3)) << i << " " << k;
      const auto& last = got[0].grad();
      const bool is_rounded = torch::equal(last, last.to(torch::kBFloat16).to(torch::kFloat));
      EXPECT_TRUE(is_rounded || i < 4);
    }
    EXPECT_EQ(sends_of_dtype(*step.step().graph(), torch::kBFloat16), 1) << *step.step().graph();
    EXPECT_EQ(sends_of_dtype(*step.step().graph(), torch::kFloat), 0);
  });
}

/// The step is captured as each rank's part of it.
TEST_P(ReplicatedStepRanks, TrainsATensorParallelModel) {
  run([] {
    const auto mesh = init_device_mesh(torch::kCPU, {world_size()});
    expect_step_parity<Mlp>(
        {.prepare =
             [&](Mlp& net) {
               parallelize_module(net, mesh,
                                  {{"first", ColwiseParallel()}, {"second", RowwiseParallel()}});
             },
         .outputs = 4,
         .steps = 9,
         .batch = [] { return 0; }});
  });
}

/// What a checkpointed part computes from distributed tensors is computed again, too.
TEST_P(ReplicatedStepRanks, ComputesCheckpointedPartsOfATensorParallelModelAgain) {
  run([] {
    const auto mesh = init_device_mesh(torch::kCPU, {world_size()});
    for (const bool checkpoints : {false, true}) {
      auto net = seeded(3, [] { return Mlp(); });
      parallelize_module(net, mesh, {{"first", ColwiseParallel()}, {"second", RowwiseParallel()}});
      if (checkpoints) checkpoint(net);
      auto compiled = compile(
          [&](torch::Tensor x) {
            auto loss = net(x * 2).square().sum();
            loss.backward();
            return loss;
          },
          {.module = net, .fullgraph = true, .backend = "interpret"});
      for (int i = 0; i < 4; ++i) compiled(torch::ones({2, 10}));
      const auto& nodes = compiled.step().graph()->nodes;
      EXPECT_EQ(std::count_if(nodes.begin(), nodes.end(),
                              [](const auto& node) { return node.op.starts_with("aten::relu"); }),
                checkpoints ? 2 : 1)
          << *compiled.step().graph();
    }
  });
}

struct NormedImpl : torch::nn::Module {
  tnn::Linear first{10, 6}, second{6, 4};
  tnn::BatchNorm1d norm{6};
  NormedImpl() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
  }
  torch::Tensor forward(torch::Tensor x) { return second(norm(first(x))); }
};
TESSERA_MODULE(Normed);

/// Statistics of each rank's batch go into its buffers; the next forward takes rank 0's.
TEST_P(ReplicatedStepRanks, SendsBuffersAtEachForward) {
  run(
      [] {
        std::vector<Normed> nets;
        for (int i = 0; i < 2; ++i) {
          nets.push_back(seeded(3, [] { return Normed(); }));
          replicate(nets[i], {.broadcast_buffers = true});
        }
        const auto step = [&](size_t which, const torch::Tensor& x) {
          nets[which]->zero_grad();
          auto loss = nets[which](x).square().sum();
          loss.backward();
          return loss;
        };
        auto compiled = compile([&](torch::Tensor x) { return step(1, x); },
                                {.module = nets[1], .fullgraph = true});
        for (int i = 0; i < 9; ++i) {
          const auto x = seeded(100 * i + rank(), [] { return torch::randn({5, 10}); });
          EXPECT_TRUE(torch::allclose(compiled(x), step(0, x), 1e-5, 1e-5)) << i;
          const auto got = nets[1]->named_buffers(), wanted = nets[0]->named_buffers();
          for (const auto& buffer : wanted)
            EXPECT_TRUE(torch::allclose(got[buffer.key()], *buffer, 1e-5, 1e-6))
                << i << " " << buffer.key();
          const auto ours = nets[1]->parameters(), theirs = nets[0]->parameters();
          for (size_t k = 0; k < ours.size(); ++k)
            EXPECT_TRUE(torch::allclose(ours[k].grad(), theirs[k].grad(), 1e-4, 1e-5)) << i << k;
          // What rank 0 writes, all have.
          if (rank() == 0) nets[0]->norm->running_mean += 1, nets[1]->norm->running_mean += 1;
        }
        EXPECT_THAT(explain(compiled), ::testing::HasSubstr("compiled: "));
        const auto& nodes = compiled.step().graph()->nodes;
        EXPECT_TRUE(std::ranges::any_of(nodes, [](const auto& node) {
          return node.op.starts_with("_c10d_functional::broadcast");
        })) << *compiled.step().graph();
      },
      3);
}

/// A rank that has run out of batches agrees on nothing: steps run eagerly.
TEST_P(ReplicatedStepRanks, JoinsRanksThatHaveFewerBatches) {
  run([] {
    auto net = seeded(3, [] { return Mlp(); }), reference = seeded(3, [] { return Mlp(); });
    replicate(net);
    replicate(reference);
    const auto step = [](Mlp& of, const torch::Tensor& x) {
      auto loss = of(x).square().sum();
      loss.backward();
      return loss;
    };
    auto compiled = compile([&](torch::Tensor x) { return step(net, x); }, {.module = net});
    const auto batch = [](int i) {
      return seeded(100 * i + rank(), [] { return torch::randn({2, 10}); });
    };
    for (int i = 0; i < 4; ++i) compiled(batch(i)), step(reference, batch(i));
    net->zero_grad();
    reference->zero_grad();
    {
      Join join(net);
      for (int i = 0; i < 3 + 3 * rank(); ++i) compiled(batch(i));
    }
    {
      Join join(reference);
      for (int i = 0; i < 3 + 3 * rank(); ++i) step(reference, batch(i));
    }
    expect_equal_gradients(net, reference, 0);
  });
}

/// A backward without messages is a rank's own affair, in whatever form and how often it comes.
TEST_P(ReplicatedStepRanks, OneRankAloneRunsBackwards) {
  run([] {
    auto net = seeded(3, [] { return Mlp(); }), reference = seeded(3, [] { return Mlp(); });
    replicate(net);
    replicate(reference);
    for (int i = 0; i < 12; ++i) {
      auto scope = std::make_optional<CompiledBackward>();
      for (int k = 0; k < (rank() == 0 ? i : 0); ++k) {
        const auto own = torch::ones({k + 1}, torch::requires_grad());
        auto loss = (own * 2).exp().sum();
        loss.backward();
        EXPECT_TRUE(torch::allclose(own.grad(), 2 * torch::exp(torch::full({k + 1}, 2.0))));
        const auto read = torch::ones({2}, torch::requires_grad());
        const auto squared = read * read;
        squared.register_hook(
            [](const at::Tensor& gradient) { (void)gradient.sum().item<float>(); });
        squared.sum().backward();  // can't be a program
        EXPECT_TRUE(torch::equal(read.grad(), torch::full({2}, 2.0)));
      }
      const auto x = seeded(100 * i + rank(), [&] { return torch::randn({1 + i % 3, 10}); });
      for (auto* each : {&net, &reference}) (*each)->zero_grad();
      net(x).square().sum().backward();
      scope.reset();
      reference(x).square().sum().backward();
      expect_equal_gradients(net, reference, i);
    }
  });
}

/// They take no place from those that all ranks have.
TEST_P(ReplicatedStepRanks, OneRankAloneHasMoreBackwardsThanAreKept) {
  run([] {
    auto net = seeded(3, [] { return Mlp(); }), reference = seeded(3, [] { return Mlp(); });
    replicate(net);
    replicate(reference);
    for (int i = 0; i < 4; ++i) {
      for (auto* each : {&net, &reference}) (*each)->zero_grad();
      {
        const CompiledBackward scope(interpret);
        net(torch::ones({2, 10})).square().sum().backward();
        for (int k = 0; k < (i == 2 && rank() == 0 ? 70 : 0); ++k) {
          const auto own = torch::ones({k + 1}, torch::requires_grad());
          (own * 2).exp().sum().backward();
        }
      }
      reference(torch::ones({2, 10})).square().sum().backward();
      expect_equal_gradients(net, reference, i);
    }
  });
}

const auto kIsTold =
    ::testing::AllOf(::testing::HasSubstr("the ranks disagree"), ::testing::HasSubstr("program "),
                     ::testing::HasSubstr("a rank without it runs eagerly"));

/// Its messages are others than those of the program.
TEST_P(ReplicatedStepRanks, ARankWhoseCallHasNoProgramIsAnErrorOnAllRanks) {
  run([] {
    auto net = seeded(3, [] { return Mlp(); });
    replicate(net);
    optim::SGD optimizer(net->parameters(), {.lr = 0.1});
    auto compiled = compile(
        [&](torch::Tensor x) {
          optimizer.zero_grad();
          net(x).square().mean().backward();
          optimizer.step();
        },
        {.module = net, .optimizer = optimizer});
    for (int i = 0; i < 4; ++i) compiled(torch::ones({5, 10}));
    EXPECT_EQ(counters()["graphs"], 1) << explain(compiled);
    EXPECT_THAT(message_of<c10::DistBackendError>(
                    [&] { compiled(torch::ones({rank() == 0 ? 5 : 4, 10})); }),
                kIsTold);
  });
}

/// Before there are programs, and with one of each rank's own, they may differ.
TEST_P(ReplicatedStepRanks, RanksHaveBatchesOfTheirOwnSizes) {
  run([] {
    expect_parity_of([](Mlp& net) { replicate(net); });
    auto net = seeded(3, [] { return Mlp(); }), reference = seeded(3, [] { return Mlp(); });
    replicate(net);
    replicate(reference);
    counters().clear();
    auto compiled = compile(
        [&](torch::Tensor x) {
          net->zero_grad();
          net(x).square().sum().backward();
        },
        {.module = net});
    for (int i = 0; i < 7; ++i) {
      const int rows = i == 1 && rank() == 1 ? 2 : 3 + rank();
      const auto x = seeded(100 * i + rank(), [&] { return torch::randn({rows, 10}); });
      reference->zero_grad();
      reference(x).square().sum().backward();
      compiled(x);
      expect_equal_gradients(net, reference, i);
    }
    // That of rank 0's second call was withdrawn, since rank 1 had none.
    EXPECT_EQ(counters()["graphs"], rank() == 0 ? 2 : 1) << explain(compiled);
    EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
  });
}

TEST_P(ReplicatedStepRanks, ARankWhoseBackwardIsNotKnownIsAnErrorOnAllRanks) {
  run([] {
    auto net = seeded(3, [] { return Mlp(); });
    replicate(net);
    auto compiled = compile(net);
    const auto train = [&](int rows) {
      const CompiledBackward scope;
      compiled(torch::ones({rows, 10})).square().sum().backward();
    };
    for (int i = 0; i < 3; ++i) train(2);
    EXPECT_THAT(message_of<c10::DistBackendError>([&] { train(rank() == 0 ? 2 : 3); }), kIsTold);
  });
}

/// Where backends compare no calls; by tensors on the CPU at once.
TEST_P(ReplicatedStepRanks, ProgramsAreCompared) {
  run([] {
    compiler::ProgramCheck check(default_group()->getGroupName(), at::kCPU);
    for (int i = 0; i < 3; ++i) check.compare(5, /*now=*/false);
    EXPECT_THAT(message_of<c10::ValueError>([&] { check.compare(5 + rank(), false); }),
                ::testing::HasSubstr("and some rank another one"));
    // A rank without a program would go on to messages that nobody sends: it reads at once.
    const auto message =
        message_of<c10::ValueError>([&] { check.compare(rank() == 0 ? 7 : 0, rank() == 1); });
    EXPECT_THAT(message, ::testing::HasSubstr(rank() == 0 ? "some rank ran eagerly"
                                                          : "this rank ran eagerly"));
  });
}

struct TwoHeadsImpl : torch::nn::Module {
  tnn::Linear trunk{register_module("trunk", tnn::Linear(10, 8))};
  tnn::Linear first{register_module("first", tnn::Linear(8, 3))};
  tnn::Linear second{register_module("second", tnn::Linear(8, 3))};
  torch::Tensor forward(const torch::Tensor& x, bool takes_second) {
    const auto hidden = torch::gelu(trunk(x));
    return takes_second ? second(hidden) : first(hidden);
  }
};
TESSERA_MODULE(TwoHeads);

/// Trains one as it is and one compiled; `prepare` makes them parallel.
void expect_parity_of_heads(const std::function<void(TwoHeads&)>& prepare,
                            const std::function<bool(int)>& takes_second) {
  TwoHeads nets[2] = {seeded(3, [] { return TwoHeads(); }), seeded(3, [] { return TwoHeads(); })};
  for (auto& net : nets) prepare(net);
  optim::SGD optimizers[2] = {optim::SGD(nets[0]->parameters(), {.lr = 0.1}),
                              optim::SGD(nets[1]->parameters(), {.lr = 0.1})};
  const auto step = [&](int of, const torch::Tensor& x, bool second) {
    optimizers[of].zero_grad();
    auto loss = nets[of](x, second).square().mean();
    loss.backward();
    optimizers[of].step();
    return loss;
  };
  auto compiled = compile([&](torch::Tensor x, bool second) { return step(1, x, second); },
                          {.module = nets[1], .optimizer = optimizers[1]});
  for (int i = 0; i < 10; ++i) {
    const auto x = seeded(100 * i + rank(), [] { return torch::randn({5, 10}); });
    step(0, x, takes_second(i));
    compiled(x, takes_second(i));
    expect_equal_parameters(nets[1], nets[0], i);
    for (const auto& item : nets[0]->named_parameters())
      EXPECT_EQ(nets[1]->named_parameters()[item.key()].grad().defined(),
                item.value().grad().defined())
          << i << " " << item.key();
  }
}

/// Gradients of one shape: those of other parameters are not to meet on their way.
TEST_P(ReplicatedStepRanks, RanksThatUseDifferentParts) {
  run([] {
    const auto prepare = [](TwoHeads& net) { replicate(net, {.find_unused_parameters = true}); };
    expect_parity_of_heads(prepare, [](int /*step*/) { return rank() == 1; });
    expect_parity_of_heads(prepare, [](int step) { return step % 3 == 0; });
    expect_parity_of_heads([](TwoHeads& net) { replicate(net, {.static_graph = true}); },
                           [](int /*step*/) { return false; });
    expect_parity_of_heads([](TwoHeads& net) { fully_shard(net); },
                           [](int /*step*/) { return rank() == 1; });
  });
}

/// Once there is a program, a rank that takes another part alone has none for it.
TEST_P(ReplicatedStepRanks, RanksThatUseDifferentPartsAtDifferentTimesAreTold) {
  run([] {
    auto net = seeded(3, [] { return TwoHeads(); });
    replicate(net, {.find_unused_parameters = true});
    auto compiled = compile(
        [&](torch::Tensor x, bool second) {
          net->zero_grad();
          net(x, second).square().mean().backward();
        },
        {.module = net});
    for (int i = 0; i < 4; ++i) compiled(torch::ones({5, 10}), false);
    EXPECT_THAT(message_of<c10::Error>([&] { compiled(torch::ones({5, 10}), rank() == 1); }),
                kIsTold);
  });
}

TEST_P(ReplicatedStepRanks, RanksThatUseDifferentPartsThoughAllAreExpected) {
  run([] {
    auto net = seeded(3, [] { return TwoHeads(); });
    replicate(net);
    auto compiled = compile(
        [&](torch::Tensor x, bool second) {
          auto loss = net(x, second).square().mean();
          loss.backward();
          return loss;
        },
        {.module = net});
    EXPECT_THAT(message_of<c10::Error>([&] {
                  for (int i = 0; i < 4; ++i) compiled(torch::ones({5, 10}), rank() == 1);
                }),
                ::testing::HasSubstr("expected every parameter of"));
  });
}

/// It is another thing at each iteration, which no program is.
TEST_P(ReplicatedStepRanks, PowerSgdIsNotCaptured) {
  run([] {
    expect_parity_of_heads(
        [](TwoHeads& net) {
          replicate(net, {.find_unused_parameters = true});
          register_comm_hook(net,
                             powersgd_hook({.start_powerSGD_iter = 4, .min_compression_rate = 1}));
        },
        [](int /*step*/) { return false; });
  });
}

/// Gradient accumulation, in the step and around it.
TEST_P(ReplicatedStepRanks, NoSyncInsideOfTheStep) {
  run([] {
    auto [net, reference] = twins<Mlp>(3);
    replicate(net);
    replicate(reference);
    const auto step = [](Mlp& of, const torch::Tensor& x) {
      of->zero_grad();
      {
        const NoSync no_sync(of);
        of(x).square().sum().backward();
      }
      auto loss = of(x * 2).square().sum();
      loss.backward();
      return loss;
    };
    auto compiled =
        compile([&net = net, &step](torch::Tensor x) { return step(net, x); }, {.module = net});
    for (int i = 0; i < 10; ++i) {
      const auto x = seeded(100 * i + rank(), [] { return torch::randn({5, 10}); });
      EXPECT_TRUE(torch::allclose(compiled(x), step(reference, x), 1e-5, 1e-5)) << i;
      expect_equal_gradients(net, reference, i);
    }
    EXPECT_THAT(explain(compiled), ::testing::HasSubstr("compiled: "));
    EXPECT_THAT(explain(compiled), ::testing::Not(::testing::HasSubstr("as it is")));
  });
}

TEST_P(ReplicatedStepRanks, NoSyncAroundTheStep) {
  const auto body = [] {
    auto [net, reference] = twins<Mlp>(3);
    replicate(net);
    replicate(reference);
    const auto part = [](Mlp& of, const torch::Tensor& x) {
      auto loss = of(x).square().sum();
      loss.backward();
      return loss.detach();
    };
    auto compiled =
        compile([&net = net, &part](torch::Tensor x) { return part(net, x); }, {.module = net});
    for (int i = 0; i < 16; ++i) {
      if (i % 2 == 0) {
        net->zero_grad();
        reference->zero_grad();
      }
      std::optional<NoSync> no_sync, other;
      if (i % 2 == 0) {
        no_sync.emplace(net);
        other.emplace(reference);
      }
      const auto x = seeded(100 * i + rank(), [] { return torch::randn({5, 10}); });
      EXPECT_TRUE(torch::allclose(compiled(x), part(reference, x), 1e-5, 1e-5)) << i;
      expect_equal_gradients(net, reference, i);
    }
    EXPECT_EQ(counters()["graphs"], 2) << explain(compiled);
    EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
  };
  for (const int ranks : {1, 2}) run(body, ranks);
}

}  // namespace
}  // namespace tessera::testing
