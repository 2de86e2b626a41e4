// Optimizers and clipping on distributed parameters, against one device.
#include <tessera/optim.h>

#include "dtensor/placed.h"

#include <cmath>

namespace tessera::testing {
namespace {

using Parameters = std::vector<at::Tensor>;
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const Parameters& parameters)>;

Parameters initial() {
  return {numbered({7, 5}) * 0.05, numbered({5}) * 0.1, numbered({5, 3}) * 0.2};
}

at::Tensor loss_of(const Parameters& parameters, const at::Tensor& x, const at::Tensor& target) {
  const auto hidden = torch::relu(torch::mm(x, parameters[0]) + parameters[1]);
  return torch::mse_loss(torch::mm(hidden, parameters[2]), target);
}

at::Tensor inputs() { return torch::sin(numbered({6, 7})); }
at::Tensor targets() { return torch::cos(numbered({6, 3})); }

/// What is done between backward and step.
using Clip = std::function<double(const Parameters&)>;

struct Recipe {
  const char* name;
  MakeOptimizer make;
};

template <class O, class Options>
Recipe recipe(const char* name, Options options) {
  return {name,
          [options](const Parameters& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
            return std::make_unique<O>(parameters, options);
          }};
}

std::vector<Recipe> recipes() {
  return {
      recipe<torch::optim::SGD>(
          "torch SGD",
          torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true)),
      recipe<torch::optim::Adam>("torch Adam", torch::optim::AdamOptions(0.01).amsgrad(true)),
      recipe<torch::optim::AdamW>("torch AdamW", torch::optim::AdamWOptions(0.01)),
      recipe<optim::SGD>("SGD", optim::SGDOptions{.lr = 0.1, .momentum = 0.9}),
      recipe<optim::SGD>("SGD foreach",
                         optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .foreach = true}),
      recipe<optim::SGD>("SGD fused", optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .fused = true}),
      recipe<optim::Adam>("Adam", optim::AdamOptions{.lr = 0.01, .weight_decay = 0.1}),
      recipe<optim::Adam>("Adam foreach", optim::AdamOptions{.lr = 0.01, .foreach = true}),
      recipe<optim::Adam>("Adam amsgrad fused",
                          optim::AdamOptions{.lr = 0.01, .amsgrad = true, .fused = true}),
      recipe<optim::AdamW>("AdamW", optim::AdamWOptions{.lr = 0.01}),
      recipe<optim::AdamW>("AdamW foreach", optim::AdamWOptions{.lr = 0.01, .foreach = true}),
      recipe<optim::AdamW>("AdamW fused", optim::AdamWOptions{.lr = 0.01, .fused = true}),
  };
}

/// Parameters and norms after each of five steps.
struct Trace {
  std::vector<Parameters> steps;
  std::vector<double> norms;
};

Trace train(Parameters parameters, const at::Tensor& x, const at::Tensor& target,
            const MakeOptimizer& make, const Clip& clip = {}) {
  for (auto& parameter : parameters) parameter.requires_grad_();
  const auto optimizer = make(parameters);
  Trace trace;
  for (int step = 0; step < 5; ++step) {
    optimizer->zero_grad();
    loss_of(parameters, x, target).backward();
    if (clip) trace.norms.push_back(clip(parameters));
    optimizer->step();
    trace.steps.emplace_back();
    for (const auto& parameter : parameters) {
      const auto whole = is_dtensor(parameter) ? full_of(parameter) : parameter.detach();
      trace.steps.back().push_back(whole.clone());
    }
  }
  return trace;
}

std::vector<Placements> layouts(size_t mesh_ndim) {
  if (mesh_ndim == 2)
    return {{Shard(0), Shard(1)}, {Replicate(), Shard(0)}, {Shard(1), Replicate()}};
  return {{Shard(1)}, {Shard(0)}, {Replicate()}};
}

Trace train_distributed(const DeviceMesh& mesh, const MakeOptimizer& make, const Clip& clip = {}) {
  const auto ndim = static_cast<size_t>(mesh.ndim());
  auto parameters = initial();
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto placements = layouts(ndim)[i];
    for (auto& placement : placements) {
      if (placement.is_shard() && placement.dim() >= parameters[i].dim()) placement = Replicate();
    }
    distribute_tensor_(parameters[i], mesh, placements);
  }
  return train(parameters, placed(inputs(), mesh, Placements(ndim)),
               placed(targets(), mesh, Placements(ndim)), make, clip);
}

void expect_same(const Trace& actual, const Trace& expected, const std::string& name) {
  const Tolerance tolerance{1e-4, 1e-5};
  for (size_t step = 0; step < expected.steps.size(); ++step) {
    for (size_t i = 0; i < expected.steps[step].size(); ++i) {
      expect_equal(actual.steps[step][i], expected.steps[step][i],
                   c10::str(name, ", step ", step, ", parameter ", i), tolerance);
    }
  }
  ASSERT_EQ(actual.norms.size(), expected.norms.size());
  for (size_t step = 0; step < expected.norms.size(); ++step)
    EXPECT_NEAR(actual.norms[step], expected.norms[step], 1e-4 * expected.norms[step]) << name;
}

class DTensorOptimizers : public ::testing::TestWithParam<MeshShape> {};

TEST_P(DTensorOptimizers, StepAsOnOneDevice) {
  std::vector<Trace> expected;
  for (const auto& one : recipes())
    expected.push_back(train(initial(), inputs(), targets(), one.make));
  on_mesh(GetParam(), [&](const DeviceMesh& mesh) {
    size_t i = 0;
    for (const auto& one : recipes())
      expect_same(train_distributed(mesh, one.make), expected[i++], one.name);
  });
}

TEST_P(DTensorOptimizers, ClipAsOnOneDevice) {
  const std::vector<std::pair<std::string, Clip>> clips = {
      {"torch clip_grad_norm_",
       [](const Parameters& parameters) {
         return torch::nn::utils::clip_grad_norm_(parameters, 0.05);
       }},
      {"clip_grad_norm_",
       [](const Parameters& parameters) {
         return optim::clip_grad_norm_(parameters, 0.05).item<double>();
       }},
      {"clip_grad_norm_ foreach",
       [](const Parameters& parameters) {
         return optim::clip_grad_norm_(parameters, 0.05, 2.0, false, true).item<double>();
       }},
      {"clip_grad_norm_ infinity",
       [](const Parameters& parameters) {
         return optim::clip_grad_norm_(parameters, 0.01, INFINITY).item<double>();
       }},
      {"clip_grad_value_",
       [](const Parameters& parameters) {
         optim::clip_grad_value_(parameters, 0.01);
         return 1.0;
       }},
  };
  const auto sgd = recipes()[3].make;
  std::vector<Trace> expected;
  for (const auto& [name, clip] : clips)
    expected.push_back(train(initial(), inputs(), targets(), sgd, clip));
  on_mesh(GetParam(), [&](const DeviceMesh& mesh) {
    for (size_t i = 0; i < clips.size(); ++i)
      expect_same(train_distributed(mesh, sgd, clips[i].second), expected[i], clips[i].first);
  });
}

INSTANTIATE_TEST_SUITE_P(OnThreads, DTensorOptimizers,
                         ::testing::Values(MeshShape{2}, MeshShape{3}, MeshShape{2, 2}),
                         [](const auto& info) { return "Mesh_" + c10::Join("_", info.param); });

}  // namespace
}  // namespace tessera::testing
