#include <tessera/optim.h>

#include "support/message_of.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>

namespace tessera::optim {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;
using Params = std::vector<at::Tensor>;

at::Tensor parameter(at::IntArrayRef shape = {2}) {
  at::Tensor param = at::ones(shape).set_requires_grad(true);
  param.mutable_grad() = at::ones(shape);
  return param;
}

TEST(OptimErrors, NoParameters) {
  const std::string expected =
      ": got an empty parameter list; pass the parameters to optimize, e.g. module->parameters()";
  EXPECT_EQ(message_of([] { SGD(Params{}, {}); }), "SGD" + expected);
  EXPECT_EQ(message_of([] { AdamW(std::vector<ParamGroup>{}, {}); }), "AdamW" + expected);
}

TEST(OptimErrors, UndefinedParameter) {
  EXPECT_EQ(message_of<c10::TypeError>([] { SGD(Params{parameter(), at::Tensor()}, {}); }),
            "SGD: expected tensors, got an undefined one as parameter 1 of its group; register the "
            "parameter before making the optimizer");
}

TEST(OptimErrors, ParameterThatIsNoLeaf) {
  EXPECT_EQ(message_of([] { Adam(Params{parameter() * 2}, {}); }),
            "Adam: can't optimize a non-leaf tensor, got one of shape [2] as parameter 0 of its "
            "group; pass the tensor it was computed from, or detach() it");
}

TEST(OptimErrors, ParameterTwice) {
  const at::Tensor p = parameter();
  EXPECT_EQ(
      message_of([&] { SGD(Params{p, p}, {}); }),
      "SGD: expected distinct parameters, got parameter 1 of shape [2] twice in a group; pass "
      "it once (libtorch's parameters() lists tied weights under each of their names)");
  EXPECT_EQ(
      message_of(
          [&] { SGD(std::vector<ParamGroup>{ParamGroup(Params{p}), ParamGroup(Params{p})}); }),
      "SGD: some parameters appear in more than one parameter group, parameter 0 of shape [2] "
      "among "
      "them; leave it in one of them");
}

TEST(OptimErrors, OptionsThatMakeNoSense) {
  const at::Tensor p = parameter();
  EXPECT_EQ(message_of([&] { SGD({p}, {.lr = -1}); }),
            "SGD: expected lr of at least 0, got -1; correct the option");
  EXPECT_THAT(message_of([&] { SGD({p}, {.momentum = -0.5}); }),
              StartsWith("SGD: expected momentum"));
  EXPECT_THAT(message_of([&] { AdamW({p}, {.weight_decay = -1}); }),
              StartsWith("AdamW: expected weight_decay"));
  EXPECT_THAT(message_of([&] { Adam({p}, {.eps = -1}); }), StartsWith("Adam: expected eps"));
  EXPECT_EQ(message_of([&] { Adam({p}, {.betas = {0.9, 1}}); }),
            "Adam: expected betas from 0 to below 1, got (0.9, 1); correct the option");
  EXPECT_EQ(message_of([&] { SGD({p}, {.momentum = 0.9, .dampening = 0.1, .nesterov = true}); }),
            "SGD: expected nesterov with a momentum above 0 and no dampening, got momentum 0.9 and "
            "dampening 0.1; correct them, or leave nesterov out");
  EXPECT_EQ(message_of([&] { SGD({p}, {.foreach = true, .fused = true}); }),
            "SGD: expected at most one of foreach and fused, got both; set one of them");
  EXPECT_THAT(message_of([&] { param_group({p}, AdamWOptions{.lr = NAN}); }),
              StartsWith("AdamW: expected lr of at least 0, got nan"));
}

TEST(OptimErrors, OptionsOfAnotherOptimizer) {
  const at::Tensor p = parameter();
  const std::string expected =
      "SGD: expected the options of its own groups to be SGDOptions of tessera::optim, got options "
      "of another optimizer; make the group with tessera::optim::param_group(params, "
      "SGDOptions{...})";
  EXPECT_EQ(message_of<c10::TypeError>(
                [&] { SGD(std::vector<ParamGroup>{param_group({p}, AdamOptions{})}); }),
            expected);
  EXPECT_EQ(message_of<c10::TypeError>([&] {
              SGD(std::vector<ParamGroup>{
                  ParamGroup(Params{p}, std::make_unique<torch::optim::SGDOptions>(0.1))});
            }),
            expected);
}

TEST(OptimErrors, GroupThatIsNotThere) {
  SGD optimizer({parameter()}, {});
  EXPECT_EQ(message_of([&] { optimizer.options(1); }),
            "SGD::options: expected a group from 0 to 0, got 1; the optimizer has 1 groups");
}

TEST(OptimErrors, SparseGradients) {
  const at::Tensor p = at::ones({2}).set_requires_grad(true);
  p.mutable_grad() = at::ones({2}).to_sparse();
  EXPECT_EQ(
      message_of<c10::NotImplementedError>([&] { Adam({p}, {}).step(); }),
      "Adam does not support sparse gradients, got one for a parameter of shape [2]; give the "
      "parameter to tessera::optim::SGD, or make the layer with sparse(false)");
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { AdamW({p}, {.fused = true}).step(); }),
              StartsWith("AdamW does not support sparse gradients"));
  EXPECT_EQ(message_of<c10::NotImplementedError>([&] { SGD({p}, {.fused = true}).step(); }),
            "SGD: fused kernels know no sparse gradients, got one for a parameter of shape [2]; "
            "leave fused out");
  EXPECT_EQ(message_of<c10::NotImplementedError>([&] { SGD({p}, {.weight_decay = 1}).step(); }),
            "SGD: weight_decay of a sparse gradient is not there, got one for a parameter of shape "
            "[2]; put the parameter into a group without weight_decay");
}

TEST(OptimErrors, FusedParametersThatKernelsCannotTake) {
  at::Tensor numbers = at::ones({2}, at::kComplexFloat).set_requires_grad(true);
  numbers.mutable_grad() = at::ones({2}, at::kComplexFloat);
  EXPECT_EQ(
      message_of<c10::Error>([&] { Adam({numbers}, {.fused = true}).step(); }),
      "Adam: fused expected floating-point parameters on a device with fused kernels, got one "
      "of complex64 on cpu; leave fused out");
  at::Tensor column = at::ones({4, 2}).select(1, 0).set_requires_grad(true);
  column.mutable_grad() = at::ones({4});
  EXPECT_EQ(message_of<c10::Error>([&] { SGD({column}, {.fused = true}).step(); }),
            "SGD: fused expected parameters whose elements lie side by side in memory, got one of "
            "shape [4] with strides [2]; leave fused out, or make the parameter contiguous");
}

TEST(OptimErrors, FusedSgdOfHalfPrecisionOnTheCpu) {
  const std::pair<c10::ScalarType, std::string> kinds[] = {{at::kBFloat16, "bfloat16"},
                                                           {at::kHalf, "float16"}};
  for (const auto& [dtype, name] : kinds) {
    at::Tensor p = at::ones({2}, dtype).set_requires_grad(true);
    p.mutable_grad() = at::ones({2}, dtype);
    SGD fused({p}, {.lr = 0.5, .momentum = 0.9, .fused = true});
    EXPECT_EQ(message_of<c10::NotImplementedError>([&] { fused.step(); }),
              "SGD: fused expected parameters of float32 or float64 on the CPU, got one of " +
                  name + "; take foreach instead");
    EXPECT_TRUE(at::equal(p, at::ones({2}, dtype))) << "a refused step changes nothing";
    SGD({p}, {.lr = 0.5, .momentum = 0.9, .foreach = true}).step();
    EXPECT_TRUE(at::equal(p, at::full({2}, 0.5, dtype))) << "the remedy works";
    Adam({p}, {.fused = true}).step();
  }
}

TEST(OptimErrors, AnErrorLeavesTheOptimizerUsable) {
  const at::Tensor good = parameter();
  const at::Tensor bad = parameter();
  Adam optimizer({good, bad}, {});
  bad.mutable_grad() = at::ones({2}).to_sparse();
  message_of<c10::NotImplementedError>([&] { optimizer.step(); });
  EXPECT_TRUE(at::equal(good, at::ones({2})));
  bad.mutable_grad() = at::ones({2});
  optimizer.step();
  EXPECT_EQ(optimizer.state_of(good).at("step").item<float>(), 1);
  EXPECT_TRUE(at::equal(good, bad));
}

TEST(OptimErrors, StateThatDoesNotFit) {
  const at::Tensor p = parameter();
  Adam optimizer({p}, {});
  EXPECT_EQ(message_of([&] { optimizer.load_state_of(p, {{"momentum_buffer", at::ones({2})}}); }),
            "Adam::load_state_of: expected state of step, exp_avg, exp_avg_sq, max_exp_avg_sq, got "
            "\"momentum_buffer\"; load the state of the same kind of optimizer");
  EXPECT_EQ(
      message_of([&] { optimizer.load_state_of(p, {{"exp_avg", at::ones({3})}}); }),
      "Adam::load_state_of: expected \"exp_avg\" of shape [2], got [3]; load the state of the "
      "same parameter");
  EXPECT_EQ(message_of([&] { optimizer.load_state_of(p, {{"exp_avg", at::Tensor()}}); }),
            "Adam::load_state_of: expected \"exp_avg\" of shape [2], got an undefined tensor; load "
            "the state of the same parameter");
  EXPECT_EQ(message_of([&] { optimizer.load_state_of(p, {{"step", at::ones({})}}); }),
            "Adam::load_state_of: expected \"exp_avg\" for a parameter of shape [2], got state "
            "without it; load state that was saved with the same options");
  EXPECT_TRUE(optimizer.state_of(p).empty());
  const std::string stranger =
      ": expected one of the optimizer's parameters, got another tensor; pass the very tensor that "
      "the optimizer was made with";
  EXPECT_EQ(message_of([&] { optimizer.state_of(parameter()); }), "Adam::state_of" + stranger);
  EXPECT_EQ(message_of([&] { optimizer.load_state_of(parameter(), {}); }),
            "Adam::load_state_of" + stranger);
}

TEST(OptimErrors, ArchiveThatDoesNotFit) {
  const at::Tensor p = parameter();
  const at::Tensor q = parameter();
  const auto load = [](const auto& saved, auto&& into) {
    std::stringstream file;
    torch::save(saved, file);
    return message_of([&] { torch::load(into, file); });
  };
  EXPECT_EQ(
      load(Adam({p}, {}), AdamW({p}, {})),
      "AdamW::load: expected the archive of AdamW, got one of Adam; load it into an optimizer "
      "of that kind");
  EXPECT_EQ(load(torch::optim::Adagrad({p}), SGD({p}, {})),
            "SGD::load: group 0: expected the options dampening, foreach, fused, lr, maximize, "
            "momentum, nesterov, weight_decay, got eps, initial_accumulator_value, lr, lr_decay, "
            "weight_decay");
  EXPECT_EQ(load(p, SGD({p}, {})),
            "SGD::load: expected an archive of libtorch 1.5 or newer, got one of \"another "
            "format\"; torch::save an optimizer of this kind");
  EXPECT_EQ(
      load(SGD({p, q}, {}), SGD({p}, {})),
      "SGD::load: the archive has a parameter group of another size: expected 1 parameters in "
      "group 0, got 2; make the optimizer with the same parameters");
  EXPECT_EQ(load(SGD({p, q}, {}),
                 SGD(std::vector<ParamGroup>{ParamGroup(Params{p}), ParamGroup(Params{q})})),
            "SGD::load: the archive has a different number of parameter groups: expected 2, got 1; "
            "make the optimizer with as many");
}

TEST(GradScalerErrors, CallsInTheWrongOrder) {
  const at::Tensor p = parameter();
  SGD optimizer({p}, {});
  GradScaler scaler({.device = at::kCPU});
  EXPECT_EQ(message_of<c10::Error>([&] { scaler.step(optimizer); }),
            "GradScaler::step: expected scale(loss) to have been called, got no scale yet; use "
            "scaler.scale(loss).backward()");
  EXPECT_THAT(message_of<c10::Error>([&] { scaler.update(); }), StartsWith("GradScaler::update"));
  scaler.scale(p.sum());
  EXPECT_EQ(
      message_of<c10::Error>([&] { scaler.update(); }),
      "GradScaler::update: expected step() or unscale_() before it, got neither since the last "
      "update(); call scaler.step(optimizer)");
  scaler.unscale_(optimizer);
  EXPECT_EQ(
      message_of<c10::Error>([&] { scaler.unscale_(optimizer); }),
      "GradScaler::unscale_: expected one call per optimizer and step, got a second one since "
      "the last update(); call it once, after all gradients have come");
  scaler.step(optimizer);
  EXPECT_EQ(
      message_of<c10::Error>([&] { scaler.step(optimizer); }),
      "GradScaler::step: expected one call per optimizer and update(), got a second one; call "
      "update() at the end of each iteration");
  EXPECT_EQ(message_of<c10::Error>([&] { scaler.unscale_(optimizer); }),
            "GradScaler::unscale_: expected to be called before step(), got called after it; call "
            "update() at the end of each iteration");
  scaler.update();
  optimizer.zero_grad();
  EXPECT_EQ(
      message_of<c10::Error>([&] { scaler.step(optimizer); }),
      "GradScaler::step: expected gradients, got none in the whole optimizer; call backward() "
      "on the scaled loss first");
}

TEST(GradScalerErrors, OptionsStateAndHalfGradients) {
  EXPECT_EQ(message_of([] { GradScaler({.device = at::kCPU, .growth_factor = 1}); }),
            "GradScaler: expected a growth_factor above 1, got 1; correct the option");
  EXPECT_EQ(message_of([] { GradScaler({.device = at::kCPU, .backoff_factor = 1}); }),
            "GradScaler: expected a backoff_factor below 1, got 1; correct the option");
  GradScaler scaler({.device = at::kCPU});
  EXPECT_THAT(message_of([&] { scaler.load_state_dict({}); }),
              HasSubstr("an empty one comes from a disabled scaler"));
  at::Tensor p = at::ones({2}, at::kHalf).set_requires_grad(true);
  p.mutable_grad() = at::ones({2}, at::kHalf);
  SGD optimizer({p}, {});
  scaler.scale(p);
  EXPECT_EQ(message_of([&] { scaler.unscale_(optimizer); }),
            "GradScaler::unscale_: expected gradients of more than half precision, got one of Half "
            "for a parameter of shape [2]; keep parameters in float32 and use autocast");
}

}  // namespace
}  // namespace tessera::optim
