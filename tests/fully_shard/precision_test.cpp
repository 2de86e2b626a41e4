// What mixed precision leaves in full precision: classes of modules, and evaluation.
#include "fully_shard/sharded_models.h"
#include "support/message_of.h"
#include "support/variables.h"

#include <gmock/gmock.h>

#include <cstdlib>

namespace tessera::testing {
namespace {

class MixedPrecisionOn : public ::testing::TestWithParam<std::string> {
 protected:
  void run(const RankBody& body) { run_processes(2, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Every, MixedPrecisionOn, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : first(register_module("first", nn::Linear(5, 7))),
        norm(register_module("norm", nn::BatchNorm1d(7))),
        last(register_module("last", nn::Linear(7, 3))) {
    shift = register_buffer("shift", torch::full({3}, 0.1));
  }
  at::Tensor forward(const at::Tensor& x) { return last(norm(first(x)).tanh()) + shift; }
  nn::Linear first;
  nn::BatchNorm1d norm;
  nn::Linear last;
  at::Tensor shift;
};
TESSERA_MODULE(Normed);

/// Dtypes at the boundaries of a module, and of its parameters while it computes.
struct Seen {
  at::ScalarType input, weight, output, after;
};

std::shared_ptr<Seen> watch(Normed& net) {
  auto seen = std::make_shared<Seen>();
  register_forward_hook(net->norm, [seen, norm = net->norm.get()](auto&, auto& arguments, auto&) {
    arguments.for_each_tensor([&](at::Tensor& x) { seen->input = x.scalar_type(); });
    seen->weight = norm->weight.scalar_type();
  });
  register_forward_pre_hook(net->last, [seen](auto&, auto& arguments) {
    arguments.for_each_tensor([&](at::Tensor& x) { seen->output = x.scalar_type(); });
  });
  register_forward_hook(net->last, [seen](auto&, auto&, auto& result) {
    seen->after = result.tensor().scalar_type();
  });
  return seen;
}

MixedPrecision low() {
  return {.param_dtype = torch::kBFloat16,
          .reduce_dtype = torch::kBFloat16,
          .buffer_dtype = torch::kBFloat16};
}

void expect_full_norm(Normed& net) {
  const auto seen = watch(net);
  const auto x = seeded(4, [] { return torch::randn({12, 5}); }).chunk(2)[rank()];
  const auto y = net(x);
  EXPECT_EQ(seen->input, torch::kFloat);
  EXPECT_EQ(seen->weight, torch::kFloat);
  EXPECT_EQ(seen->output, torch::kBFloat16);
  EXPECT_EQ(seen->after, torch::kBFloat16);
  EXPECT_EQ(net->norm->running_mean.scalar_type(), torch::kFloat);
  EXPECT_EQ(net->shift.scalar_type(), torch::kBFloat16);
  y.square().mean().backward();
  EXPECT_EQ(net->norm->weight.grad().scalar_type(), torch::kFloat);
}

TEST_P(MixedPrecisionOn, LeavesBatchNormsOut) {
  run([] {
    auto net = seeded(3, [] { return Normed(); });
    fully_shard(net, {.mixed_precision = low()});
    expect_full_norm(net);
  });
}

TEST_P(MixedPrecisionOn, LeavesBatchNormsOutThatAPolicyMakesUnits) {
  run([] {
    auto net = seeded(3, [] { return Normed(); });
    fully_shard(
        net, {.policy = ModuleWrapPolicy::of<torch::nn::LinearImpl, torch::nn::BatchNorm1dImpl>(),
              .mixed_precision = low()});
    EXPECT_EQ(fully_shard_state(net->norm)->param_names().size(), 2);
    expect_full_norm(net);
  });
}

TEST_P(MixedPrecisionOn, LeavesOutWhatItIsTold) {
  run([] {
    auto precision = low();
    precision.module_classes_to_ignore = module_classes<torch::nn::LinearImpl>();
    auto net = seeded(3, [] { return Normed(); });
    const auto seen = watch(net);
    fully_shard(net, {.mixed_precision = precision});
    net(torch::randn({4, 5}));
    EXPECT_EQ(seen->weight, torch::kBFloat16);
    EXPECT_EQ(net->norm->running_mean.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(net->last->weight.scalar_type(), torch::kFloat);
    bool is_float = false;
    register_forward_hook(net->last, [&](auto&, auto& arguments, auto&) {
      arguments.for_each_tensor(
          [&](at::Tensor& x) { is_float = x.scalar_type() == torch::kFloat; });
    });
    net(torch::randn({4, 5}));
    EXPECT_TRUE(is_float);
    precision.module_classes_to_ignore = module_classes<>();
    auto plain = seeded(3, [] { return Normed(); });
    const auto seen_plain = watch(plain);
    fully_shard(plain, {.mixed_precision = precision});
    plain(torch::randn({4, 5}));
    EXPECT_EQ(seen_plain->weight, torch::kBFloat16);
    EXPECT_EQ(seen_plain->input, torch::kBFloat16);
  });
}

struct UnhookedImpl : torch::nn::Module {
  UnhookedImpl() : norm(register_module("norm", torch::nn::BatchNorm1d(5))) {}
  at::Tensor forward(const at::Tensor& x) { return norm(x); }
  torch::nn::BatchNorm1d norm;
};
TESSERA_MODULE(Unhooked);

TEST(MixedPrecisionErrors, ABatchNormThatCannotBeHooked) {
  run_processes(1, [] {
    Unhooked net;
    EXPECT_THAT(message_of([&] { fully_shard(net, {.mixed_precision = low()}); }),
                ::testing::AllOf(::testing::HasSubstr("fully_shard, with mixed precision"),
                                 ::testing::HasSubstr("BatchNorm1d")));
  });
}

struct EvaluatedImpl : torch::nn::Module {
  EvaluatedImpl() : body(register_module("body", Stack())) {
    scale = register_buffer("scale", torch::full({3}, 0.1));
  }
  at::Tensor forward(const at::Tensor& x) { return body(x) * scale; }
  Stack body;
  at::Tensor scale;
};
TESSERA_MODULE(Evaluated);

Evaluated shard_low(Evaluated net, std::optional<bool> full_in_eval) {
  MixedPrecision precision = low();
  precision.full_precision_in_eval = full_in_eval;
  for (const auto& block : *net->body->blocks) fully_shard(block, {.mixed_precision = precision});
  fully_shard(net, {.mixed_precision = precision});
  return net;
}

TEST_P(MixedPrecisionOn, EvaluatesInFullPrecisionIfAsked) {
  run([] {
    auto [reference, net] = twins<Evaluated>(3);
    shard_low(net, true);
    const auto x = seeded(4, [] { return torch::randn({6, 5}); });
    EXPECT_EQ(net(x).scalar_type(), torch::kBFloat16);
    net->eval();
    const auto scale = net->scale.to(torch::kFloat);
    EXPECT_NE(scale[0].item<float>(), 0.1F) << "rounded once";
    for (int i = 0; i < 2; ++i) {
      const auto y = net(x);
      EXPECT_EQ(y.scalar_type(), torch::kFloat);
      EXPECT_EQ(net->scale.scalar_type(), torch::kFloat);
      expect_equal(y, reference->body(x) * scale, "in evaluation");
      // Eval mode has gradients, too.
      y.sum().backward();
      (reference->body(x) * scale).sum().backward();
      EXPECT_EQ(net->body->first->weight.grad().scalar_type(), torch::kFloat);
    }
    net->train();
    EXPECT_EQ(net(x).scalar_type(), torch::kBFloat16);
    EXPECT_EQ(net->scale.scalar_type(), torch::kBFloat16);
  });
}

TEST_P(MixedPrecisionOn, EvaluationBetweenForwardAndBackwardChangesNothing) {
  run([] {
    const auto x = seeded(4, [] { return torch::randn({6, 5}); });
    std::vector<at::Tensor> gradients;
    for (const bool evaluates : {false, true}) {
      auto net = shard_low(seeded(3, [] { return Evaluated(); }), true);
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        const auto loss = net(x).square().mean();
        if (evaluates) {
          const torch::NoGradGuard no_grad;
          net->eval();
          EXPECT_EQ(net(x).scalar_type(), torch::kFloat);
          net->train();
        }
        loss.backward();
      }
      gradients.push_back(whole(net->body->block(1)->up->weight.grad()));
    }
    expect_bitwise_equal(gradients[0], gradients[1]);
  });
}

TEST_P(MixedPrecisionOn, TheVariableAsksForFullPrecisionInEvaluation) {
  run([] {
    const auto x = torch::ones({2, 5});
    auto net = shard_low(seeded(3, [] { return Evaluated(); }), std::nullopt);
    net->eval();
    EXPECT_EQ(net(x).scalar_type(), torch::kBFloat16) << "not by default";
    const Variables full_precision{{{"FSDP_USE_FULL_PREC_IN_EVAL", "1"}}};
    auto full = shard_low(seeded(3, [] { return Evaluated(); }), std::nullopt);
    full->eval();
    EXPECT_EQ(full(x).scalar_type(), torch::kFloat);
    auto asked = shard_low(seeded(3, [] { return Evaluated(); }), false);
    asked->eval();
    EXPECT_EQ(asked(x).scalar_type(), torch::kBFloat16) << "the option counts more";
  });
}

}  // namespace
}  // namespace tessera::testing
