// Compiled steps whose tensors share memory, and whose checkpointed parts are computed again.
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "compiler/ir/operators.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <vector>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

constexpr auto* kRan = "compiled: ";

/// Inputs and targets of a language model are slices of one window.
TEST(CompiledStepMemory, ArgumentsThatOverlap) {
  auto compiled = compile([](torch::Tensor x, torch::Tensor y) { return (x * 2 - y).sum(0); },
                          {.fullgraph = true});
  for (int i = 0; i < 5; ++i) {
    const auto window = torch::randn({3, 9});
    const auto x = window.slice(1, 0, 8), y = window.slice(1, 1);
    EXPECT_TRUE(torch::equal(compiled(x, y), (x * 2 - y).sum(0))) << i;
  }
  EXPECT_THAT(explain(compiled), HasSubstr(kRan));
}

TEST(CompiledStepMemory, TheSameArgumentTwiceAndThenAnother) {
  auto compiled = compile([](torch::Tensor x, torch::Tensor y) { return x * 2 - y; });
  const auto x = torch::randn({4}), y = torch::randn({4});
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(torch::equal(compiled(x, x), x)) << i;
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(torch::equal(compiled(x, y), x * 2 - y)) << i;
  EXPECT_THAT(explain(compiled), HasSubstr("shares memory with another"));
}

/// A sum of products, block by block: nothing is copied for it.
TEST(CompiledStepMemory, AResultThatIsAnArgumentToo) {
  const auto run = [](const torch::Tensor& x) {
    auto sum = torch::zeros({3, 3});
    for (const auto& block : x.chunk(4)) torch::addmm_out(sum, sum, block.t(), block);
    auto twice = sum * 1;
    torch::mul_out(twice, twice, twice);
    return std::vector<torch::Tensor>{sum, twice};
  };
  for (const auto* backend : {"interpret", "codegen"}) {
    auto compiled = compile(run, {.fullgraph = true, .backend = backend});
    for (int i = 0; i < 4; ++i) {
      const auto x = torch::randn({8, 3});
      const auto got = compiled(x), wanted = run(x);
      for (size_t k = 0; k < wanted.size(); ++k)
        EXPECT_TRUE(torch::allclose(got[k], wanted[k])) << backend << " " << i << " " << k;
    }
    EXPECT_THAT(generated_code(compiled), ::testing::Not(HasSubstr("\n  clone"))) << backend;
  }
}

TEST(CompiledStepMemory, ArgumentsOutOfATensorItKnows) {
  const auto data = torch::randn({10, 4});
  auto compiled = compile([&](torch::Tensor x) { return data.mean(0) + x; }, {.fullgraph = true});
  for (int i = 0; i < 8; ++i)
    EXPECT_TRUE(torch::equal(compiled(data[i]), data.mean(0) + data[i])) << i;
  EXPECT_THAT(explain(compiled), HasSubstr(kRan));
}

TEST(CompiledStepErrors, ArgumentsThatOverlapAndAreWritten) {
  auto compiled = compile([](torch::Tensor x, torch::Tensor y) {
    x.add_(1);
    return y * 1;
  });
  for (int i = 0; i < 4; ++i) {
    const auto window = torch::zeros({5});
    const auto y = compiled(window.slice(0, 0, 4), window.slice(0, 1));
    EXPECT_TRUE(torch::equal(y, torch::tensor({1.F, 1.F, 1.F, 0.F}))) << i;
  }
  EXPECT_THAT(explain(compiled), HasSubstr("overlaps"));
}

TEST(CompiledStepErrors, AParameterAsArgument) {
  auto net = nn::Linear(3, 3);
  auto compiled =
      compile([&](torch::Tensor w) { return w.sum() + net->weight.sum(); }, {.module = net});
  const torch::NoGradGuard no_grad;
  for (int i = 0; i < 4; ++i) {
    const auto other = torch::randn({3, 3});
    for (const auto& w : {net->weight, other})
      EXPECT_TRUE(torch::equal(compiled(w), w.sum() + net->weight.sum())) << i;
  }
  EXPECT_THAT(explain(compiled), HasSubstr("argument 0 is a parameter"));
}

struct DroppingImpl : torch::nn::Module {
  nn::Linear in{6, 6}, out{6, 6};
  DroppingImpl() {
    register_module("in", in);
    register_module("out", out);
  }
  torch::Tensor forward(torch::Tensor x) {
    return out(torch::dropout(torch::gelu(in(x)), 0.5, is_training())) + 0.1 * torch::rand_like(x);
  }
};
TESSERA_MODULE(Dropping);

struct NestImpl : torch::nn::Module {
  Dropping first, second;
  NestImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  torch::Tensor forward(torch::Tensor x) { return torch::dropout(second(first(x)), 0.2, true); }
};
TESSERA_MODULE(Nest);

/// What is drawn in forward is kept, however often it is computed again; the rest is not.
TEST(CompiledStepMemory, CheckpointedPartsThatDraw) {
  Nest nets[2];
  for (auto& net : nets) {
    torch::manual_seed(3);
    net = Nest();
    checkpoint(net->first);
    checkpoint(net);  // around the other one, which has none of its own
  }
  optim::SGD optimizers[2] = {optim::SGD(nets[0]->parameters(), {.lr = 0.1}),
                              optim::SGD(nets[1]->parameters(), {.lr = 0.1})};
  const auto step = [&](int of, const torch::Tensor& x) {
    auto loss = nets[of](x).square().mean();
    loss.backward();
    optimizers[of].step();
    optimizers[of].zero_grad();
    return torch::cat({loss.detach().view({1}), torch::rand({2})});
  };
  auto compiled = compile([&](torch::Tensor x) { return step(1, x); },
                          {.module = nets[1], .optimizer = optimizers[1], .fullgraph = true});
  for (int i = 0; i < 6; ++i) {
    const auto x = torch::randn({5, 6});
    torch::manual_seed(i);
    const auto wanted = step(0, x);
    torch::manual_seed(i);
    EXPECT_TRUE(torch::allclose(compiled(x), wanted, 1e-6, 1e-6)) << "step " << i;
    const auto got = nets[1]->parameters(), reference = nets[0]->parameters();
    for (size_t k = 0; k < got.size(); ++k)
      EXPECT_TRUE(torch::allclose(got[k], reference[k], 1e-6, 1e-6)) << i << ", parameter " << k;
  }
  EXPECT_THAT(explain(compiled), HasSubstr(kRan));
}

/// What backward computes again needs gradients where the forward did, or it saves other tensors.
TEST(CompiledStepMemory, CheckpointedPartsInTheMiddle) {
  for (const bool compiles : {false, true}) {
    torch::manual_seed(3);
    auto first = nn::Linear(6, 6), middle = nn::Linear(6, 6);
    checkpoint(middle);
    const auto run = [&](torch::Tensor x) {
      auto loss = middle(first(x)).square().sum();
      loss.backward();
      return loss;
    };
    auto compiled = compile(run, {.fullgraph = true, .backend = "interpret"});
    const auto x = torch::ones({2, 6});
    for (int i = 0; i < 4; ++i) compiles ? compiled(x) : run(x);
    static at::Tensor reference;
    if (!compiles) reference = first->weight.grad();
    EXPECT_TRUE(torch::allclose(first->weight.grad(), reference));
  }
}

/// Equal computations are merged, but not those that save memory.
TEST(CompiledStepMemory, CheckpointedPartsAreComputedAgain) {
  for (const bool checkpoints : {false, true}) {
    auto net = nn::Sequential(nn::Linear(6, 6), nn::GELU(), nn::Linear(6, 6));
    if (checkpoints) checkpoint(net);
    auto compiled = compile(
        [&](torch::Tensor x) {
          auto loss = net->forward(x).sum();
          loss.backward();
          return loss;
        },
        {.module = net, .fullgraph = true, .backend = "interpret"});
    for (int i = 0; i < 4; ++i) compiled(torch::ones({2, 6}));
    const auto& nodes = compiled.step().graph()->nodes;
    EXPECT_EQ(std::count_if(nodes.begin(), nodes.end(),
                            [](const auto& node) {
                              return node.op == "aten::gelu" || node.op == "aten::gelu_";
                            }),
              checkpoints ? 2 : 1)
        << *compiled.step().graph();
  }
}

/// Large enough to be updated by blocks of rows, the last of which is short.
constexpr int64_t kLarge = 1100;

template <class Optimizer, class Options>
void expect_updates_by_rows(const Options& options, int updates,
                            const std::function<torch::Tensor(std::vector<torch::Tensor>&)>& loss) {
  std::vector<torch::Tensor> weights[2];
  for (auto& each : weights) {
    torch::manual_seed(5);
    for (int i = 0; i < 2; ++i)
      each.push_back((torch::randn({kLarge, kLarge}) / 30).requires_grad_());
    each.push_back(torch::randn({kLarge}).requires_grad_());
  }
  Optimizer optimizers[2] = {Optimizer(weights[0], options), Optimizer(weights[1], options)};
  const auto step = [&](int of) {
    optimizers[of].zero_grad();
    auto value = loss(weights[of]);
    value.backward();
    optimizers[of].step();
    return value.detach();
  };
  auto compiled = compile([&] { return step(1); }, {.optimizer = optimizers[1], .fullgraph = true});
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(torch::allclose(compiled(), step(0))) << i;
    for (size_t k = 0; k < weights[0].size(); ++k) {
      EXPECT_TRUE(torch::allclose(weights[1][k], weights[0][k], 1e-6, 1e-7)) << i << ", " << k;
      const auto& wanted = weights[0][k].grad();
      EXPECT_LE((weights[1][k].grad() - wanted).abs().max().item<double>(),
                1e-5 * wanted.abs().max().item<double>())
          << i << ", " << k;
    }
  }
  EXPECT_THAT(explain(compiled), HasSubstr(kRan));
  const auto* graph = compiled.step().graph();
  ASSERT_NE(graph, nullptr);
  EXPECT_EQ(std::ranges::count_if(graph->nodes, compiler::is_fused_update), updates)
      << graph->str();
}

TEST(CompiledStepMemory, LargeWeightsAreUpdatedByRows) {
  const auto x = torch::randn({3, kLarge});
  const auto chain = [&](std::vector<torch::Tensor>& weights) {
    const auto hidden = torch::tanh(torch::linear(x, weights[0], weights[2]));
    return torch::linear(hidden, weights[1]).square().mean();
  };
  expect_updates_by_rows<optim::AdamW>(optim::AdamWOptions{.lr = 1e-3, .eps = 1e-4, .fused = true},
                                       3, chain);
  expect_updates_by_rows<optim::Adam>(
      optim::AdamOptions{
          .lr = 1e-3, .eps = 1e-4, .weight_decay = 0.1, .amsgrad = true, .fused = true},
      3, chain);
  expect_updates_by_rows<optim::SGD>(
      optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true, .fused = true}, 3, chain);
}

/// The rows of such a gradient are made of all rows of the weight.
TEST(CompiledStepMemory, AGradientThatIsMadeOfItsWeight) {
  expect_updates_by_rows<optim::SGD>(
      optim::SGDOptions{.lr = 10, .fused = true}, 2, [](std::vector<torch::Tensor>& weights) {
        return weights[0].mm(weights[0].detach()).mean() + weights[1].square().mean() +
               weights[2].square().mean();
      });
}

}  // namespace
}  // namespace tessera::testing
