#include <tessera/tessera.h>

#include "support/message_of.h"
#include "support/peer.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::optim {
namespace {

using testing::expect_bitwise_equal;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::message_of;
using testing::seeded;
using testing::Tolerance;
using MakeSchedule = std::function<std::unique_ptr<LRScheduler>(torch::optim::Optimizer&)>;

struct ScheduleCase {
  std::string name;
  std::string python;  // after torch.optim.lr_scheduler.
  MakeSchedule make;
  int steps;
};

template <class Scheduler, class Options>
ScheduleCase schedule(const std::string& python, const Options& options, int steps) {
  return {python, python,
          [options](torch::optim::Optimizer& optimizer) {
            return std::make_unique<Scheduler>(optimizer, options);
          },
          steps};
}

std::vector<at::Tensor> two_parameters() {
  return {at::zeros({1}).set_requires_grad(true), at::zeros({1}).set_requires_grad(true)};
}

AdamW two_groups() {
  const auto params = two_parameters();
  return AdamW(std::vector<ParamGroup>{param_group({params[0]}, AdamWOptions{.lr = 0.1}),
                                       param_group({params[1]}, AdamWOptions{.lr = 0.02})});
}

/// Rates and first betas of both groups, before each step.
at::Tensor rates_over(const ScheduleCase& which) {
  AdamW optimizer = two_groups();
  const auto scheduler = which.make(optimizer);
  std::vector<double> rows;
  for (int step = 0; step < which.steps; ++step) {
    for (const size_t g : {0, 1}) rows.push_back(optimizer.options(g).lr);
    for (const size_t g : {0, 1}) rows.push_back(optimizer.options(g).betas.first);
    EXPECT_EQ(scheduler->last_lr(),
              (std::vector<double>{rows[rows.size() - 4], rows[rows.size() - 3]}));
    optimizer.step();
    scheduler->step();
  }
  return at::tensor(rows, at::kDouble).view({which.steps, 4});
}

std::vector<ScheduleCase> every_schedule() {
  return {schedule<CosineAnnealingLR>("CosineAnnealingLR(opt, T_max=13)",
                                      CosineAnnealingLROptions{.T_max = 13}, 60),
          schedule<CosineAnnealingLR>("CosineAnnealingLR(opt, T_max=10, eta_min=0.001)",
                                      CosineAnnealingLROptions{.T_max = 10, .eta_min = 0.001}, 10),
          schedule<LinearLR>("LinearLR(opt)", LinearLROptions{}, 9),
          schedule<LinearLR>(
              "LinearLR(opt, start_factor=1.0, end_factor=0.05, total_iters=31)",
              LinearLROptions{.start_factor = 1, .end_factor = 0.05, .total_iters = 31}, 40),
          schedule<OneCycleLR>("OneCycleLR(opt, max_lr=0.3, total_steps=40)",
                               OneCycleLROptions{.max_lr = 0.3, .total_steps = 40}, 40),
          schedule<OneCycleLR>("OneCycleLR(opt, max_lr=[0.3, 0.1], epochs=5, steps_per_epoch=7, "
                               "three_phase=True, anneal_strategy='linear', base_momentum=0.8)",
                               OneCycleLROptions{.max_lr = std::vector{0.3, 0.1},
                                                 .epochs = 5,
                                                 .steps_per_epoch = 7,
                                                 .anneal_strategy = "linear",
                                                 .base_momentum = 0.8,
                                                 .three_phase = true},
                               35),
          schedule<OneCycleLR>("OneCycleLR(opt, max_lr=0.3, total_steps=17, pct_start=0.1, "
                               "cycle_momentum=False, div_factor=10, final_div_factor=50)",
                               OneCycleLROptions{.max_lr = 0.3,
                                                 .total_steps = 17,
                                                 .pct_start = 0.1,
                                                 .cycle_momentum = false,
                                                 .div_factor = 10,
                                                 .final_div_factor = 50},
                               17)};
}

constexpr const char* kSchedule = R"(
def run(name, make, steps):
    p = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    opt = torch.optim.AdamW([{'params': p[:1]}, {'params': p[1:], 'lr': 0.02}], lr=0.1)
    scheduler = make(opt)
    rows = []
    for _ in range(steps):
        rows.append([g['lr'] for g in opt.param_groups] + [g['betas'][0] for g in opt.param_groups])
        opt.step()
        scheduler.step()
    outputs[name] = torch.tensor(rows, dtype=torch.float64)
)";

TEST(SchedulerPeer, EveryStepIsPythons) {
  if (const auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  std::string script = kSchedule;
  for (const auto& one : every_schedule())
    script += "run(\"" + one.name + "\", lambda opt: torch.optim.lr_scheduler." + one.python +
              ", " + std::to_string(one.steps) + ")\n";
  const auto result = testing::run_peer(script);
  ASSERT_TRUE(result.ok());
  for (const auto& one : every_schedule())
    expect_bitwise_equal(rates_over(one), result[one.name], one.name);
}

double rate_at(AdamW& optimizer, LRScheduler& scheduler, int step) {
  for (; step > 0; --step) scheduler.step();
  return optimizer.options().lr;
}

TEST(Scheduler, WarmupStableDecay) {
  const auto rate = [](const std::string& decay_type, int step) {
    AdamW optimizer(two_parameters(), {.lr = 0.5});
    WarmupStableDecayLR scheduler(optimizer, {.num_warmup_steps = 10,
                                              .num_decay_steps = 20,
                                              .num_training_steps = 100,
                                              .decay_type = decay_type,
                                              .min_lr_ratio = 0.1});
    return rate_at(optimizer, scheduler, step);
  };
  for (const char* type : {"linear", "cosine", "1-sqrt"}) {
    EXPECT_EQ(rate(type, 0), 0);
    EXPECT_DOUBLE_EQ(rate(type, 4), 0.2);
    EXPECT_EQ(rate(type, 10), 0.5);
    EXPECT_EQ(rate(type, 79), 0.5);
    EXPECT_EQ(rate(type, 80), 0.5);
    EXPECT_DOUBLE_EQ(rate(type, 100), 0.05);
    EXPECT_DOUBLE_EQ(rate(type, 130), 0.05);
  }
  EXPECT_DOUBLE_EQ(rate("linear", 90), 0.5 * 0.55);
  EXPECT_DOUBLE_EQ(rate("cosine", 85), 0.5 * (0.1 + 0.9 * (1 + std::cos(M_PI / 4)) / 2));
  EXPECT_DOUBLE_EQ(rate("1-sqrt", 85), 0.5 * (0.1 + 0.9 * 0.5));
}

TEST(Scheduler, GoesOnFromItsState) {
  for (const auto& one : every_schedule()) {
    AdamW first = two_groups(), second = two_groups();
    const auto saved = one.make(first), loaded = one.make(second);
    for (int step = 0; step < 7; ++step) saved->step();
    loaded->load_state_dict(saved->state_dict());
    EXPECT_EQ(loaded->last_lr(), saved->last_lr()) << one.name;
    EXPECT_EQ(second.options(1).lr, first.options(1).lr) << one.name;
    EXPECT_EQ(second.options(1).betas, first.options(1).betas) << one.name;
    saved->step();
    loaded->step();
    EXPECT_EQ(loaded->state_dict(), saved->state_dict()) << one.name;
    EXPECT_EQ(second.options(0).lr, first.options(0).lr) << one.name;
  }
}

TEST(Scheduler, AStateThatDoesNotFitChangesNothing) {
  AdamW optimizer = two_groups(), other = two_groups();
  OneCycleLR schedule(optimizer, {.max_lr = 0.5, .total_steps = 10});
  OneCycleLR longer(other, {.max_lr = 0.5, .total_steps = 20});
  for (int step = 0; step < 15; ++step) longer.step();
  const auto before = schedule.state_dict();
  const auto betas = optimizer.options().betas;
  EXPECT_THAT(message_of([&] { schedule.load_state_dict(longer.state_dict()); }),
              HasSubstr("expected at most 10 steps, got step 15"));
  EXPECT_EQ(schedule.state_dict(), before);
  EXPECT_EQ(optimizer.options().betas, betas);
}

/// Phases of OneCycleLR that have no step of their own.
TEST(Scheduler, OneCycleMayRiseWithinAStep) {
  for (const double share : {0.1, 1.0}) {
    AdamW optimizer = two_groups();
    OneCycleLR schedule(optimizer, {.max_lr = 0.5, .total_steps = 10, .pct_start = share});
    for (int step = 0; step < 10; ++step) {
      const double lr = optimizer.options().lr;
      EXPECT_TRUE(lr > 0 && lr <= 0.5) << share << " " << step << " " << lr;
      EXPECT_GT(optimizer.options().betas.first, 0.5) << share << " " << step;
      schedule.step();
    }
  }
}

/// Steps of two equal nets, one compiled, under a schedule.
void expect_one_program(const MakeSchedule& make, const AdamWOptions& options) {
  counters().clear();
  torch::nn::Linear nets[2] = {nullptr, nullptr};
  for (auto& net : nets) net = seeded(3, [] { return torch::nn::Linear(6, 4); });
  AdamW optimizers[2] = {AdamW(nets[0]->parameters(), options),
                         AdamW(nets[1]->parameters(), options)};
  const auto eager = make(optimizers[0]), scheduler = make(optimizers[1]);
  const auto train = [&](int of, const at::Tensor& x) {
    optimizers[of].zero_grad();
    auto loss = nets[of]->forward(x).square().mean();
    loss.backward();
    optimizers[of].step();
    return loss;
  };
  auto compiled = compile([&](torch::Tensor x) { return train(1, x); },
                          {.module = nets[1], .optimizer = optimizers[1], .backend = "interpret"});
  for (int step = 0; step < 20; ++step) {
    const auto x = seeded(50 + static_cast<uint64_t>(step), [] { return at::randn({5, 6}); });
    const auto wanted = train(0, x);
    expect_equal(compiled(x), wanted, "", Tolerance{.rtol = 1e-5, .atol = 1e-6});
    eager->step();
    scheduler->step();
    expect_equal(nets[1]->weight.detach(), nets[0]->weight.detach(), c10::str("step ", step),
                 Tolerance{.rtol = 1e-5, .atol = 1e-6});
  }
  EXPECT_EQ(counters()["graphs"], 1) << explain(compiled);
  EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
}

TEST(Scheduler, CompiledStepsTakeTheRatesOfOneProgram) {
  for (const bool fused : {false, true}) {
    const AdamWOptions options{.lr = 0.05, .fused = fused};
    for (const auto& one : every_schedule()) {
      if (one.name.find("OneCycleLR") != std::string::npos) continue;
      SCOPED_TRACE(one.name);
      expect_one_program(one.make, options);
    }
    expect_one_program(
        [](torch::optim::Optimizer& optimizer) {
          return std::make_unique<OneCycleLR>(
              optimizer,
              OneCycleLROptions{.max_lr = 0.1, .total_steps = 20, .cycle_momentum = false});
        },
        options);
    expect_one_program(
        [](torch::optim::Optimizer& optimizer) {
          return std::make_unique<WarmupStableDecayLR>(
              optimizer,
              WarmupStableDecayLROptions{
                  .num_warmup_steps = 5, .num_decay_steps = 5, .num_training_steps = 20});
        },
        options);
  }
}

TEST(SchedulerErrors, SayWhatTheyExpect) {
  AdamW adamw(two_parameters());
  EXPECT_EQ(
      message_of([&] { CosineAnnealingLR(adamw, {}); }),
      "CosineAnnealingLR: expected T_max of at least 1, got 0; set it to the number of steps");
  EXPECT_THAT(message_of([&] { LinearLR(adamw, {.start_factor = 0}); }),
              HasSubstr("expected start_factor above 0 and up to 1, got 0"));
  EXPECT_THAT(message_of([&] { LinearLR(adamw, {.end_factor = 2}); }),
              HasSubstr("expected end_factor from 0 to 1, got 2"));
  EXPECT_THAT(message_of([&] { LinearLR(adamw, {.total_iters = 0}); }),
              HasSubstr("expected total_iters of at least 1, got 0"));
  EXPECT_THAT(message_of([&] { OneCycleLR(adamw, {.max_lr = 1}); }),
              HasSubstr("expected total_steps, or epochs and steps_per_epoch"));
  EXPECT_THAT(
      message_of([&] { OneCycleLR(adamw, {.max_lr = std::vector{1.0, 2.0}, .total_steps = 3}); }),
      HasSubstr("expected one max_lr or 1"));
  EXPECT_THAT(
      message_of([&] { OneCycleLR(adamw, {.max_lr = 1, .total_steps = 3, .pct_start = 2}); }),
      HasSubstr("expected pct_start from 0 to 1, got 2"));
  EXPECT_THAT(message_of([&] {
                OneCycleLR(adamw, {.max_lr = 1, .total_steps = 3, .anneal_strategy = "exp"});
              }),
              HasSubstr("expected anneal_strategy"));
  OneCycleLR cycle(adamw, {.max_lr = 1, .total_steps = 2});
  cycle.step();
  cycle.step();
  EXPECT_EQ(message_of([&] { cycle.step(); }),
            "OneCycleLR: expected at most 2 steps, got step 3; make it with more total_steps");
  Adafactor adafactor(two_parameters());
  EXPECT_THAT(message_of([&] { OneCycleLR(adafactor, {.max_lr = 1, .total_steps = 3}); }),
              HasSubstr("expected an optimizer with momentum or betas, got another"));
  EXPECT_THAT(message_of([&] {
                WarmupStableDecayLR(
                    adamw, {.num_warmup_steps = 3, .num_decay_steps = 3, .num_training_steps = 5});
              }),
              HasSubstr("within num_training_steps, got 3 + 3 of 5"));
  EXPECT_THAT(message_of([&] { WarmupStableDecayLR(adamw, {.decay_type = "exp"}); }),
              HasSubstr("expected decay_type"));
  EXPECT_THAT(message_of([&] { WarmupStableDecayLR(adamw, {.min_lr_ratio = 2}); }),
              HasSubstr("expected min_lr_ratio from 0 to 1"));
  LinearLR linear(adamw);
  EXPECT_THAT(message_of([&] { linear.load_state_dict({{"last_epoch", 3}}); }),
              HasSubstr("LinearLR::load_state_dict: expected last_epoch, and base_lr and lr of 1"));
  auto state = linear.state_dict();
  state["last_epoch"] = 0.5;
  EXPECT_THAT(message_of([&] { linear.load_state_dict(state); }),
              HasSubstr("expected last_epoch to be a whole number from 0, got 0.5"));
  adamw.add_param_group(ParamGroup(two_parameters()));
  EXPECT_THAT(message_of([&] { linear.step(); }), HasSubstr("expected 1 parameter groups"));
}

}  // namespace
}  // namespace tessera::optim
