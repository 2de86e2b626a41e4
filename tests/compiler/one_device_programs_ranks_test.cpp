// What programs of DataParallelSemantics::OneDevice send and hold, and which steps they are not
// made for.
#include "parallel_cases.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

#include <algorithm>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

using Step = std::function<Tensors(Parts&, torch::optim::Optimizer&, const Tensors&)>;

ParallelCase layers() {
  return {"",
          [](PartsImpl& net) {
            net.parameter(torch::randn({5, 3}, real()));
            net.parameter(torch::randn({2, 5}, real()));
          },
          [](PartsImpl& net, const Tensors& given) -> Tensors {
            const auto out = torch::tanh(given[0].mm(net.p[0].t())).mm(net.p[1].t());
            return {torch::mse_loss(out, given[1]), out};
          },
          [](int64_t count) -> Tensors {
            const auto x = torch::randn({count, 3}, real());
            return {x, torch::randn({count, 2}, real())};
          }};
}

bool is_named(const Node& node, const char* part) {
  return node.op.find(part) != std::string::npos;
}

/// The program of a step after two calls that gave what one device gives. `told`: what explain
/// says.
Graph program_of(const ParallelCase& of, const std::string& style, const Step& step,
                 std::string* told = nullptr) {
  auto net = make_parts(of), reference = make_parts(of);
  const auto optimizer = optimizer_for(net, true), other = optimizer_for(reference, true);
  torch::manual_seed(3);
  const auto first = of.draw(6);
  step(net, *optimizer, first);
  step(reference, *other, first);
  optimizer->zero_grad();
  const DataParallel mode(style, {.semantics = DataParallelSemantics::OneDevice});
  auto compiled = compile([&](Parts& module, torch::optim::Optimizer& opt,
                              const Tensors& given) { return step(module, opt, given); },
                          {.parallel_mode = mode, .backend = "interpret"});
  const auto half = static_cast<int64_t>(3);
  for (int i = 0; i < 2; ++i) {
    const auto whole = of.draw(2 * half);
    const auto wanted = step(reference, *other, whole);
    const auto results = compiled(net, *optimizer, part_of_batch(of, whole, {half, half}, rank()));
    expect_near(results[0], wanted[0].detach(), "loss");
    for (size_t k = 0; k < net->p.size(); ++k) {
      expect_near(gathered(net->p[k]), reference->p[k].detach(), "parameter");
      expect_near(gathered(net->p[k].grad()), reference->p[k].grad(), "gradient");
    }
  }
  if (told != nullptr) *told = explain(compiled);
  return *compiled.step().graph();
}

/// Tensors that such messages carry.
int64_t sent(const Graph& graph, const char* message) {
  int64_t count = 0;
  for (const auto& node : graph.nodes) {
    if (is_named(node, message)) count += std::ssize(node.arguments[0].values);
  }
  return count;
}

TEST(OneDeviceProgramsRanks, SumGradientsOfSeveralBackwardsOnce) {
  run_processes(2, [] {
    const Step twice = [](Parts& net, torch::optim::Optimizer& optimizer, const Tensors& given) {
      optimizer.zero_grad();
      auto results = net(given);
      results[0].backward();
      net(Tensors{given[0] * 0.5, given[1]})[0].backward();
      optimizer.step();
      return results;
    };
    const auto once = sent(program_of(layers(), "replicate", train_parts), "all_reduce");
    EXPECT_GT(once, 0);
    EXPECT_EQ(sent(program_of(layers(), "replicate", twice), "all_reduce"), once);
  });
}

TEST(OneDeviceProgramsRanks, GatherParametersOnceAndNothingOfTheUpdate) {
  run_processes(2, [] {
    const Step scales = [](Parts& net, torch::optim::Optimizer& optimizer, const Tensors& given) {
      optimizer.zero_grad();
      auto results = net(given);
      results[0].backward();
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : net->p) {
          auto& gradient = parameter.mutable_grad();
          const auto doubled = gradient * 2.0;
          gradient.mul_(0.5 / (1.0 + gradient.t().pow(2).sum() + doubled.t().abs().sum()));
          for (const auto& [name, state] :
               dynamic_cast<optim::AdamW&>(optimizer).state_of(parameter))
            if (state.dim() > 1) state.div_(1.0 + state.t().pow(2).sum());
        }
      }
      optimizer.step();
      return results;
    };
    const auto plain = sent(program_of(layers(), "fully_shard", train_parts), "all_gather");
    EXPECT_GT(plain, 0);
    EXPECT_LE(plain, 2);  // parameters: in forward, and kept for backward
    std::string told;
    EXPECT_EQ(sent(program_of(layers(), "fully_shard", scales, &told), "all_gather"), plain);
    EXPECT_THAT(told, Not(HasSubstr("samples of several ranks")));  // norms are no samples
  });
}

TEST(OneDeviceProgramsRanks, SayHowValuesArePlaced) {
  run_processes(2, [] {
    const auto graph = program_of(layers(), "replicate", train_parts);
    EXPECT_TRUE(std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
      return is_named(node, "aten::tanh") && graph.type(node.defined()[0]).placement == Shard(0);
    })) << graph;
  });
}

TEST(OneDeviceProgramsRanks, KeepLayoutsOfParameters) {
  auto turned = layers();
  turned.make = [](PartsImpl& net) {
    net.parameter(torch::randn({3, 5}, real()).t());
    net.parameter(torch::randn({2, 5}, real()));
    net.parameter(torch::randn({4}, real()));
  };
  turned.forward = [](PartsImpl& net, const Tensors& given) -> Tensors {
    const auto weight = net.p[0].t().view({-1}).view({3, 5});  // contiguous that way
    const auto out = torch::tanh(given[0].mm(weight)).mm(net.p[1].t());
    return {torch::mse_loss(out, given[1]) + net.p[2].sum(), out};
  };
  run_processes(2, [&] {
    for (const auto* style : {"replicate", "fully_shard"}) program_of(turned, style, train_parts);
  });
}

/// Writes through views give values that all ranks have: they are sharded again.
TEST(OneDeviceProgramsRanks, LeaveWhatTheyWriteAsItWasPlaced) {
  const Step writes = [](Parts& net, torch::optim::Optimizer& optimizer, const Tensors& given) {
    auto results = train_parts(net, optimizer, given);
    const torch::NoGradGuard no_grad;
    net->p[0].narrow(0, 1, 1).zero_();
    net->p[1].view({-1}).mul_(0.5);
    net->p[0].mutable_grad().narrow(0, 2, 2).zero_();
    return results;
  };
  run_processes(2, [&] {
    for (const auto* style : {"replicate", "fully_shard"}) {
      const auto graph = program_of(layers(), style, writes);
      for (const auto& output : graph.outputs) {
        if (output.kind == OutputKind::Result || output.value == kNoValue) continue;
        EXPECT_EQ(graph.type(output.value).sizes, graph.type(output.target).sizes) << graph;
      }
    }
  });
}

/// What is empty is alike on ranks that have none of it, and on those alone.
TEST(OneDeviceProgramsRanks, SendTheSameOfSeveralEmptyShards) {
  auto narrow = layers();
  narrow.make = [](PartsImpl& net) {
    for (int i = 0; i < 3; ++i) net.parameter(torch::randn({1, 3}, real()));
  };
  narrow.forward = [](PartsImpl& net, const Tensors& given) -> Tensors {
    const auto out = torch::tanh(given[0].mm(net.p[0].t())) * given[0].mm(net.p[1].t()) +
                     given[0].mm(net.p[2].t());
    return {torch::mse_loss(out.expand({-1, 2}), given[1]), out};
  };
  run_processes(2, [&] {
    for (const auto* style : {"replicate", "fully_shard"}) program_of(narrow, style, train_parts);
  });
}

Tensors call_once(const ParallelCase& of, const Tensors& given) {
  auto net = make_parts(of);
  optim::SGD optimizer(net->parameters(), {.lr = 0.1});
  auto compiled = compile(
      [](Parts& module, optim::SGD& opt, const Tensors& tensors) {
        return train_parts(module, opt, tensors);
      },
      {.parallel_mode = DataParallel("replicate", {.semantics = DataParallelSemantics::OneDevice}),
       .backend = "interpret"});
  return compiled(net, optimizer, given);
}

TEST(OneDeviceErrorsRanks, NameMessagesOfTheStep) {
  auto sends = layers();
  sends.forward = [](PartsImpl& net, const Tensors& given) -> Tensors {
    const auto out = given[0].mm(net.p[0].t()).mm(net.p[1].t());
    return {torch::mse_loss(out, given[1]) + all_reduce(out.detach()).sum()};
  };
  run_processes(2, [&] {
    EXPECT_THAT([&] { call_once(sends, sends.draw(4)); },
                ThrowsMessage<c10::NotImplementedError>(
                    HasSubstr("DataParallel: expected a step of one rank, without messages of its "
                              "own, got _c10d_functional::")));
  });
}

TEST(OneDeviceErrorsRanks, NameRanksWithOtherArguments) {
  run_processes(2, [] {
    auto given = layers().draw(4);
    if (rank() == 1) given.push_back(given[0]);
    EXPECT_THAT([&] { call_once(layers(), given); },
                ThrowsMessage<c10::ValueError>(
                    HasSubstr(rank() == 0 ? "expected 2 tensors among the arguments on all ranks, "
                                            "but rank 1 has 3"
                                          : "expected 3 tensors among the arguments on all ranks, "
                                            "but rank 0 has 2")));
    auto other = layers().draw(4);
    if (rank() == 1) other[1] = other[1].slice(1, 0, 1);
    EXPECT_THAT([&] { call_once(layers(), other); },
                ThrowsMessage<c10::ValueError>(
                    HasSubstr(rank() == 0 ? "Double[-1, 2] on this rank and Double[-1, 3], "
                                            "Double[-1, 1] on rank 1"
                                          : "Double[-1, 1] on this rank and Double[-1, 3], "
                                            "Double[-1, 2] on rank 0")));
  });
}

}  // namespace
}  // namespace tessera::testing
