#include "optim/peer_training.h"

#include <gtest/gtest.h>

#include <array>

namespace tessera::optim {
namespace {

using testing::expect_training_as_in_python;
using testing::PeerCase;
using Params = std::vector<at::Tensor>;

PeerCase sgd(const std::string& name, const std::string& python, SGDOptions options) {
  return {name, "torch.optim.SGD(params, " + python + ")",
          [options](Params params) { return std::make_unique<SGD>(std::move(params), options); }};
}

PeerCase adam(const std::string& name, const std::string& python, AdamOptions options) {
  return {name, "torch.optim.Adam(params, " + python + ")",
          [options](Params params) { return std::make_unique<Adam>(std::move(params), options); }};
}

PeerCase adamw(const std::string& name, const std::string& python, AdamWOptions options) {
  return {name, "torch.optim.AdamW(params, " + python + ")",
          [options](Params params) { return std::make_unique<AdamW>(std::move(params), options); }};
}

PeerCase with_dtype(PeerCase one, at::ScalarType dtype) {
  one.dtype = dtype;
  one.name += std::string("_") + at::toString(dtype);
  return one;
}

/// Each way of choosing kernels, as Python's and as ours.
struct KernelChoice {
  const char* python;
  std::optional<bool> foreach;
  std::optional<bool> fused;
};
constexpr std::array<KernelChoice, 4> kChoices = {{{"foreach=None", {}, {}},
                                                   {"foreach=False", false, {}},
                                                   {"foreach=True", true, {}},
                                                   {"fused=True", {}, true}}};

TEST(OptimPeer, SgdOfEveryKind) {
  std::vector<PeerCase> cases;
  const auto add = [&](const std::string& python, SGDOptions options) {
    for (const KernelChoice& choice : kChoices) {
      options.foreach = choice.foreach;
      options.fused = choice.fused;
      const std::string all = "lr=0.05, " + python + ", " + choice.python;
      cases.push_back(sgd("sgd " + python + " " + choice.python, all, options));
    }
  };
  add("momentum=0", {.lr = 0.05});
  add("maximize=True", {.lr = 0.05, .maximize = true});
  add("weight_decay=0.1", {.lr = 0.05, .weight_decay = 0.1});
  add("momentum=0.9", {.lr = 0.05, .momentum = 0.9});
  add("momentum=0.9, dampening=0.3", {.lr = 0.05, .momentum = 0.9, .dampening = 0.3});
  add("momentum=0.9, nesterov=True", {.lr = 0.05, .momentum = 0.9, .nesterov = true});
  add("momentum=0.9, weight_decay=0.1, nesterov=True, maximize=True",
      {.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true, .maximize = true});
  add("momentum=0.9, weight_decay=0.1, dampening=0.2",
      {.lr = 0.05, .momentum = 0.9, .dampening = 0.2, .weight_decay = 0.1});
  expect_training_as_in_python(cases);
}

TEST(OptimPeer, AdamOfEveryKind) {
  std::vector<PeerCase> cases;
  const auto add = [&](const std::string& python, AdamOptions options) {
    for (const KernelChoice& choice : kChoices) {
      options.foreach = choice.foreach;
      options.fused = choice.fused;
      cases.push_back(adam("adam " + python + " " + choice.python,
                           "lr=0.01, " + python + ", " + choice.python, options));
    }
  };
  add("eps=1e-8", {.lr = 0.01});
  add("betas=(0.8, 0.9), eps=1e-6", {.lr = 0.01, .betas = {0.8, 0.9}, .eps = 1e-6});
  add("amsgrad=True", {.lr = 0.01, .amsgrad = true});
  add("maximize=True", {.lr = 0.01, .maximize = true});
  add("weight_decay=0.1", {.lr = 0.01, .weight_decay = 0.1});
  add("weight_decay=0.1, maximize=True, amsgrad=True",
      {.lr = 0.01, .weight_decay = 0.1, .amsgrad = true, .maximize = true});
  add("weight_decay=0.1, decoupled_weight_decay=True",
      {.lr = 0.01, .weight_decay = 0.1, .decoupled_weight_decay = true});
  expect_training_as_in_python(cases);
}

TEST(OptimPeer, AdamWOfEveryKind) {
  std::vector<PeerCase> cases;
  const auto add = [&](const std::string& python, AdamWOptions options) {
    for (const KernelChoice& choice : kChoices) {
      options.foreach = choice.foreach;
      options.fused = choice.fused;
      cases.push_back(
          adamw("adamw " + python + " " + choice.python, python + ", " + choice.python, options));
    }
  };
  add("lr=1e-3", {});
  add("lr=0.01, weight_decay=0.3", {.lr = 0.01, .weight_decay = 0.3});
  add("lr=0.01, amsgrad=True", {.lr = 0.01, .amsgrad = true});
  add("lr=0.01, amsgrad=True, maximize=True", {.lr = 0.01, .amsgrad = true, .maximize = true});
  expect_training_as_in_python(cases);
}

TEST(OptimPeer, OtherPrecisions) {
  std::vector<PeerCase> cases;
  for (const auto dtype : {at::kDouble, at::kBFloat16}) {
    for (const KernelChoice& choice : kChoices) {
      const std::string kernels = choice.python;
      const bool is_there = dtype != at::kBFloat16 || choice.fused != true;  // SGD refuses it
      if (is_there)
        cases.push_back(
            with_dtype(sgd("sgd " + kernels, "lr=0.05, momentum=0.9, weight_decay=0.1, " + kernels,
                           {.lr = 0.05,
                            .momentum = 0.9,
                            .weight_decay = 0.1,
                            .foreach = choice.foreach,
                            .fused = choice.fused}),
                       dtype));
      cases.push_back(
          with_dtype(adamw("adamw " + kernels, "lr=0.01, " + kernels,
                           {.lr = 0.01, .foreach = choice.foreach, .fused = choice.fused}),
                     dtype));
    }
  }
  expect_training_as_in_python(cases);
}

TEST(OptimPeer, GroupsSchedulersAndClipping) {
  std::vector<PeerCase> cases = {
      {"sgd_groups",
       "torch.optim.SGD([{'params': params[:1]}, {'params': params[1:3], 'lr': 0.2, 'momentum': "
       "0.5}, {'params': params[3:]}], lr=0.05, foreach=True)",
       [](Params params) {
         return std::make_unique<SGD>(
             std::vector<ParamGroup>{
                 ParamGroup(Params{params[0]}),
                 param_group(Params{params[1], params[2]},
                             SGDOptions{.lr = 0.2, .momentum = 0.5, .foreach = true}),
                 ParamGroup(Params{params[3]})},
             SGDOptions{.lr = 0.05, .foreach = true});
       }},
      {"adamw_groups",
       "torch.optim.AdamW([{'params': params[::2], 'weight_decay': 0.2}, {'params': params[1::2], "
       "'lr': 0.02, 'weight_decay': 0.0}], lr=0.01, fused=True)",
       [](Params params) {
         return std::make_unique<AdamW>(std::vector<ParamGroup>{
             param_group({params[0], params[2]},
                         AdamWOptions{.lr = 0.01, .weight_decay = 0.2, .fused = true}),
             param_group({params[1], params[3]},
                         AdamWOptions{.lr = 0.02, .weight_decay = 0, .fused = true})});
       }}};
  for (PeerCase& one : cases) {
    one.step_lr = 9;
    one.clip = 0.25;
  }
  cases.push_back(sgd("sgd_step_lr", "lr=0.1", {.lr = 0.1}));
  cases.back().step_lr = 10;
  cases.push_back(adam("adam_clip", "lr=0.01", {.lr = 0.01}));
  cases.back().clip = 0.1;
  cases.push_back(with_dtype(adam("adam_clip", "lr=0.01", {.lr = 0.01}), at::kBFloat16));
  cases.back().clip = 1000;  // never reached
  expect_training_as_in_python(cases);
}

}  // namespace
}  // namespace tessera::optim
