// What a step does with parameters and gradients besides one backward and one update: compared with
// the same step of a replicated copy.
#include <tessera/compile.h>
#include <tessera/dtensor.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::Tensor;

/// A module of parameters, with a function of them for a forward.
struct BagImpl : torch::nn::Module {
  std::vector<Tensor> p;
  std::function<Tensor(BagImpl&, Tensor)> function;
  void add(Tensor values) {
    p.push_back(register_parameter("p" + std::to_string(p.size()), std::move(values)));
  }
  Tensor forward(Tensor x) { return function(*this, x); }
};
TESSERA_MODULE(Bag);

using Optimizer = torch::optim::Optimizer;

struct Case {
  std::string name;
  std::function<void(BagImpl&)> make;
  std::function<Tensor(BagImpl&, Tensor)> forward;
  std::function<Tensor(Bag&, Optimizer&, Tensor, Tensor)> step;
  bool zeroes_before = false;  // each call
  std::vector<int64_t> x = {4, 2}, y = {4, 2};
};

void two_layers(BagImpl& bag) {
  bag.add(torch::randn({5, 2}));
  bag.add(torch::randn({2, 5}));
}

Tensor through_two_layers(BagImpl& bag, Tensor x) {
  return torch::tanh(x.mm(bag.p[0].t())).mm(bag.p[1].t());
}

Tensor train(Bag& net, Optimizer& optimizer, Tensor x, Tensor y) {
  optimizer.zero_grad();
  auto loss = torch::mse_loss(net(x), y);
  loss.backward();
  optimizer.step();
  return loss;
}

Tensor gathered(const Tensor& tensor) {
  if (!is_dtensor(tensor)) return tensor.detach();
  return DTensor::of(tensor).redistribute({Replicate()}).to_local().detach();
}

std::unique_ptr<Optimizer> make_optimizer(Bag& net, int kind) {
  if (kind == 0)
    return std::make_unique<optim::SGD>(net->parameters(), optim::SGDOptions{.lr = 0.1});
  if (kind == 1)
    return std::make_unique<optim::SGD>(
        net->parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .foreach = true});
  return std::make_unique<optim::AdamW>(net->parameters(),
                                        optim::AdamWOptions{.lr = 0.01, .fused = kind == 2});
}

Bag make_bag(const Case& of) {
  torch::manual_seed(1);
  Bag net;
  of.make(*net);
  net->function = of.forward;
  return net;
}

void expect_like_replicated(const Case& of, const std::string& style, int kind) {
  SCOPED_TRACE(of.name + ", " + style + ", optimizer " + std::to_string(kind));
  auto net = make_bag(of), copy = make_bag(of);
  replicate(copy);
  const auto optimizer = make_optimizer(net, kind), reference = make_optimizer(copy, kind);
  const auto batch = [&](int seed) {
    torch::manual_seed(seed);
    const auto x = torch::randn(of.x);
    return std::pair(x, torch::randn(of.y));
  };
  const auto [warm_x, warm_y] = batch(5);
  of.step(net, *optimizer, warm_x, warm_y);
  of.step(copy, *reference, warm_x, warm_y);
  optimizer->zero_grad();
  reference->zero_grad();
  auto compiled = compile(
      [&](Bag& module, Optimizer& opt, Tensor x, Tensor y) { return of.step(module, opt, x, y); },
      {.parallel_mode = DataParallel(style), .backend = "interpret"});
  for (int i = 0; i < 3; ++i) {
    const auto [x, y] = batch(100 + 10 * i + static_cast<int>(rank()));
    if (of.zeroes_before) optimizer->zero_grad();
    if (of.zeroes_before) reference->zero_grad();
    const auto wanted = of.step(copy, *reference, x, y);
    EXPECT_TRUE(torch::allclose(compiled(net, *optimizer, x, y), wanted, 1e-5, 1e-5)) << i;
    for (size_t k = 0; k < net->p.size(); ++k) {
      EXPECT_TRUE(torch::allclose(gathered(net->p[k]), copy->p[k], 1e-5, 1e-5))
          << "call " << i << ", parameter " << k << ": " << gathered(net->p[k]) << copy->p[k];
      EXPECT_TRUE(torch::allclose(gathered(net->p[k].grad()), copy->p[k].grad(), 1e-5, 1e-5))
          << "call " << i << ", gradient " << k;
    }
  }
}

void expect_like_replicated(const std::vector<Case>& cases, std::vector<int> kinds = {0, 1, 2, 3}) {
  for (const int ranks : {2, 3}) {
    run_processes(ranks, [&] {
      for (const auto& each : cases) {
        for (const auto* style : {"replicate", "fully_shard"}) {
          for (const int kind : kinds) expect_like_replicated(each, style, kind);
        }
      }
    });
  }
}

Case two_layers_with(std::string name, decltype(Case::step) step) {
  return {std::move(name), two_layers, through_two_layers, std::move(step)};
}

TEST(DataParallelUpdatesRanks, AddUpGradientsOfSeveralBackwards) {
  const auto two_losses = [](Bag& net, Optimizer& optimizer, Tensor x, Tensor y) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(net(x), y);
    loss.backward();
    auto further = net(x * 0.5).pow(2).mean();
    further.backward();
    optimizer.step();
    return loss + further;
  };
  const auto parts_of_the_batch = [](Bag& net, Optimizer& optimizer, Tensor x, Tensor y) {
    optimizer.zero_grad();
    auto sum = torch::zeros({});
    for (const int64_t row : {0, 1, 3}) {
      const auto loss =
          torch::mse_loss(net(x.narrow(0, row, 1)), y.narrow(0, row, 1)) * (row + 1.0);
      loss.backward();
      sum = sum + loss.detach();
    }
    optimizer.step();
    return sum;
  };
  // What was there after the first one is used, too.
  const auto scaled_between = [](Bag& net, Optimizer& optimizer, Tensor x, Tensor y) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(net(x), y);
    loss.backward();
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->p) parameter.grad().mul_(0.5);
    }
    net(x * 0.5).pow(2).mean().backward();
    optimizer.step();
    return loss;
  };
  expect_like_replicated({two_layers_with("two losses", two_losses),
                          two_layers_with("parts of the batch", parts_of_the_batch),
                          two_layers_with("scaled between", scaled_between)});
}

TEST(DataParallelUpdatesRanks, AverageTheSumOfSeveralBackwardsOnce) {
  run_processes(2, [] {
    for (const auto* style : {"replicate", "fully_shard"}) {
      auto net = make_bag({"", two_layers, through_two_layers, {}});
      auto compiled = compile(
          [](Bag& module, Tensor x) {
            module->zero_grad();
            for (const int64_t row : {0, 1, 2}) module(x.narrow(0, row, 1)).sum().backward();
          },
          {.parallel_mode = DataParallel(style)});
      compiled(net, torch::ones({3, 2}));
      const auto& nodes = compiled.step().graph()->nodes;
      EXPECT_EQ(std::count_if(nodes.begin(), nodes.end(),
                              [](const Node& node) {
                                return node.op.find("all_reduce") != std::string::npos ||
                                       node.op.find("reduce_scatter") != std::string::npos;
                              }),
                1)
          << *compiled.step().graph();
    }
  });
}

TEST(DataParallelUpdatesRanks, BroadcastParametersOverEachOther) {
  const auto scaled_by = [](std::string name, std::vector<int64_t> scale) {
    return Case{std::move(name),
                [scale](BagImpl& bag) {
                  two_layers(bag);
                  bag.add(torch::randn(scale));
                },
                [](BagImpl& bag, Tensor x) {
                  return torch::tanh(x.mm((bag.p[0] * bag.p[2]).t())).mm(bag.p[1].t());
                },
                train};
  };
  const auto scales_gradients = [](Bag& net, Optimizer& optimizer, Tensor x, Tensor y) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(net(x), y);
    loss.backward();
    {
      const torch::NoGradGuard no_grad;
      net->p[0].grad().mul_(torch::tensor({0.5, 2.0}));
      net->p[1].grad().add_(torch::arange(10).view({2, 5}) * 0.1);
    }
    optimizer.step();
    return loss;
  };
  const auto norms_columns = [](Bag& net, Optimizer& optimizer, Tensor x, Tensor y) {
    auto loss = train(net, optimizer, x, y);
    const torch::NoGradGuard no_grad;
    net->p[0].div_(net->p[0].norm(2, {0}, true));
    net->p[1].div_(net->p[1].norm(2, {1}, true));
    return loss;
  };
  expect_like_replicated({scaled_by("columns", {2}), scaled_by("one row", {1, 2}),
                          scaled_by("rows", {5, 1}), scaled_by("a number", {}),
                          two_layers_with("scales gradients", scales_gradients),
                          two_layers_with("norms columns", norms_columns)});
}

TEST(DataParallelUpdatesRanks, StepTwiceInACall) {
  const auto twice = [](Bag& net, Optimizer& optimizer, Tensor x, Tensor y) {
    train(net, optimizer, x, y);
    return train(net, optimizer, x * 0.5, y);
  };
  // Parameters that are used elementwise look like those of an update.
  const Case elementwise{"elementwise",
                         [](BagImpl& bag) {
                           bag.add(torch::randn({2}));
                           bag.add(torch::randn({2}));
                         },
                         [](BagImpl& bag, Tensor x) { return x * bag.p[0] + bag.p[1]; }, twice};
  expect_like_replicated({elementwise, two_layers_with("two layers", twice)});
}

TEST(DataParallelUpdatesRanks, TakeGradientsThatWereZeroedBefore) {
  auto outside =
      two_layers_with("zeroes before", [](Bag& net, Optimizer& optimizer, Tensor x, Tensor y) {
        auto loss = torch::mse_loss(net(x), y);
        loss.backward();
        optimizer.step();
        return loss;
      });
  outside.zeroes_before = true;
  expect_like_replicated({outside}, {0, 1});
}

TEST(DataParallelUpdatesRanks, KeepLayoutsOfParameters) {
  const Case transposed{"transposed",
                        [](BagImpl& bag) {
                          bag.add(torch::randn({2, 5}).t());
                          bag.add(torch::randn({2, 5}));
                        },
                        through_two_layers, train};
  Case convolution{
      "channels last",
      [](BagImpl& bag) {
        bag.add((torch::randn({5, 3, 3, 3}) * 0.2).contiguous(torch::MemoryFormat::ChannelsLast));
        bag.add(torch::randn({2, 5}));
      },
      [](BagImpl& bag, Tensor x) {
        x = x.contiguous(torch::MemoryFormat::ChannelsLast);
        const auto maps = torch::relu(torch::conv2d(x, bag.p[0], {}, 1, 1));
        return maps.mean(at::IntArrayRef{2, 3}).mm(bag.p[1].t());
      },
      train};
  convolution.x = {4, 3, 6, 6};
  expect_like_replicated({transposed, convolution});
}

TEST(DataParallelUpdatesRanks, TakeCallsWithoutBackward) {
  run_processes(2, [] {
    for (const auto* style : {"replicate", "fully_shard"}) {
      const auto step = [](Bag& net, optim::SGD& optimizer, Tensor x, bool updates) {
        optimizer.zero_grad();
        auto loss = net(x).pow(2).mean();
        if (updates) loss.backward();
        if (updates) optimizer.step();
        return loss;
      };
      const Case of{"", two_layers, through_two_layers, {}};
      auto net = make_bag(of), copy = make_bag(of);
      replicate(copy);
      optim::SGD optimizer(net->parameters(), {.lr = 0.1}),
          reference(copy->parameters(), {.lr = 0.1});
      auto compiled = compile(step, {.parallel_mode = DataParallel(style), .backend = "interpret"});
      for (int i = 0; i < 6; ++i) {
        torch::manual_seed(10 * i + rank());
        const auto x = torch::randn({4, 2});
        const bool updates = i % 3 != 2;
        const auto wanted = step(copy, reference, x, updates);
        EXPECT_TRUE(torch::allclose(compiled(net, optimizer, x, updates), wanted, 1e-5, 1e-5));
        EXPECT_EQ(net->p[0].grad().defined(), updates) << i;
        EXPECT_TRUE(torch::allclose(gathered(net->p[0]), copy->p[0], 1e-5, 1e-5)) << style << i;
      }
    }
  });
}

/// What it did before is undone, so that ranks stay alike.
TEST(DataParallelUpdatesRanks, AreUndoneIfTheFunctionThrows) {
  run_processes(2, [] {
    for (const auto* style : {"replicate", "fully_shard"}) {
      const Case of{"", two_layers, through_two_layers, {}};
      auto net = make_bag(of);
      optim::SGD optimizer(net->parameters(), {.lr = 0.1});
      int calls = 0;
      auto compiled = compile(
          [&](Bag& module, optim::SGD& opt, Tensor x) {
            opt.zero_grad();
            auto loss = module(x).pow(2).mean();
            loss.backward();
            opt.step();
            if (calls++ == 0) throw std::runtime_error("once");
            return loss;
          },
          {.parallel_mode = DataParallel(style), .backend = "interpret"});
      torch::manual_seed(rank());
      EXPECT_THAT([&] { compiled(net, optimizer, torch::randn({4, 2})); },
                  ThrowsMessage<std::runtime_error>(HasSubstr("once")));
      EXPECT_TRUE(torch::equal(gathered(net->p[0]), make_bag(of)->p[0]));
      EXPECT_FALSE(net->p[0].grad().defined());
      compiled(net, optimizer, torch::randn({4, 2}));
      EXPECT_FALSE(torch::equal(gathered(net->p[0]), make_bag(of)->p[0]));
    }
  });
}

TEST(DataParallelErrorsRanks, NameParametersWithGapsInMemory) {
  run_processes(2, [] {
    const Case of{"",
                  [](BagImpl& bag) {
                    bag.add(torch::randn({5, 4}).narrow(1, 0, 2));
                    bag.add(torch::randn({2, 5}));
                  },
                  through_two_layers,
                  {}};
    auto net = make_bag(of);
    auto compiled = compile([](Bag& module, Tensor x) { return module(x).sum().detach(); },
                            {.parallel_mode = DataParallel("replicate")});
    EXPECT_THAT([&] { compiled(net, torch::ones({4, 2})); },
                ThrowsMessage<c10::NotImplementedError>(
                    HasSubstr("DataParallel: expected p0 to fill its memory, got sizes [5, 2]")));
    EXPECT_FALSE(is_dtensor(net->p[0]));
  });
}

/// Of a step that was written for one rank.
TEST(DataParallelUpdatesRanks, AverageInSixteenBits) {
  run_processes(3, [] {
    for (const auto* style : {"replicate", "fully_shard"}) {
      const Case of{"", two_layers, through_two_layers, {}};
      auto net = make_bag(of), copy = make_bag(of);
      replicate(copy);
      register_comm_hook(copy, bf16_compress_hook);
      auto compiled = compile(
          [](Bag& module, Tensor x) {
            module->zero_grad();
            module(x).pow(2).mean().backward();
          },
          {.parallel_mode = DataParallel(style),
           .compress_gradients = torch::kBFloat16,
           .backend = "interpret"});
      for (int i = 0; i < 2; ++i) {
        torch::manual_seed(10 * i + rank());
        const auto x = torch::randn({4, 2});
        compiled(net, x);
        copy->zero_grad();
        copy(x).pow(2).mean().backward();
        for (size_t k = 0; k < net->p.size(); ++k) {
          const auto gradient = gathered(net->p[k].grad());
          EXPECT_TRUE(torch::allclose(gradient, copy->p[k].grad(), 2e-2, 1e-3)) << style;
          EXPECT_TRUE(torch::equal(gradient, gradient.to(torch::kBFloat16).to(torch::kFloat)));
        }
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing
