#pragma once

#include <tessera/nn.h>
#include <tessera/parallelize.h>

#include "support/tolerance.h"

#include <torch/torch.h>

#include <functional>
#include <vector>

/// The models of the requirements, and what compares a parallel one with a plain one.
namespace tessera::testing {

/// Linear(10 -> 16), relu, Linear(16 -> 10), always with the same weights.
struct MlpModuleImpl : torch::nn::Cloneable<MlpModuleImpl> {
  MlpModuleImpl() { reset(); }
  void reset() override {
    torch::manual_seed(5);
    net1 = register_module("net1", nn::Linear(10, 16));
    relu = register_module("relu", nn::ReLU());
    net2 = register_module("net2", nn::Linear(16, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return net2(relu(net1(x))); }
  nn::Linear net1{nullptr}, net2{nullptr};
  nn::ReLU relu{nullptr};
};
TESSERA_MODULE(MlpModule);

struct MlpStackedImpl : torch::nn::Cloneable<MlpStackedImpl> {
  explicit MlpStackedImpl(int64_t layer_count = 2) : layer_count(layer_count) { reset(); }
  void reset() override {
    layers = register_module("layers", nn::ModuleList());
    for (int64_t i = 0; i < layer_count; ++i) layers->push_back(MlpModule());
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = layer->as<MlpModule>()->forward(x);
    return x;
  }
  int64_t layer_count;
  nn::ModuleList layers{nullptr};
};
TESSERA_MODULE(MlpStacked);

/// No parameters; returns its input.
struct DummyImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TESSERA_MODULE(Dummy);

inline DeviceMesh mesh_of_all(c10::DeviceType device = torch::kCPU) {
  return {device, at::arange(world_size(), torch::kLong)};
}

/// A distributed tensor gathered, a plain one as it is.
inline at::Tensor full_value(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? DTensor::of(tensor).full_tensor() : tensor;
}

enum class Compared { Parameters, Gradients };

/// Every parameter of `parallel` (or its gradient) is distributed, and equal to that of `plain`.
inline void expect_equal_parameters(const torch::nn::Module& plain,
                                    const torch::nn::Module& parallel, Compared what) {
  const auto of = [&](const at::Tensor& parameter) {
    return what == Compared::Parameters ? parameter.detach() : parameter.grad();
  };
  const auto distributed = parallel.named_parameters();
  for (const auto& item : plain.named_parameters()) {
    const auto actual = of(distributed[item.key()]);
    ASSERT_TRUE(is_dtensor(actual)) << item.key();
    expect_equal(DTensor::of(actual).redistribute({Replicate()}).to_local(), of(item.value()),
                 item.key());
  }
}

/// The module comparison of REQUIREMENTS.md 1.4, with nothing skipped on any rank.
template <class M>
void expect_equal_modules(M& plain, M& parallel, std::vector<int64_t> input_size,
                          bool rowwise = false) {
  torch::optim::SGD plain_optimizer(plain->parameters(), 0.25);
  torch::optim::SGD parallel_optimizer(parallel->parameters(), 0.25);
  torch::manual_seed(0);
  const auto x = torch::rand(input_size).to(plain->parameters()[0].device());
  expect_equal_parameters(*plain, *parallel, Compared::Parameters);

  const auto expected = plain(x);
  const auto output = parallel(rowwise ? x.chunk(world_size(), -1)[rank()] : x);
  expect_equal(full_value(output), expected, "output");
  expected.sum().backward();
  output.sum().backward();
  expect_equal_parameters(*plain, *parallel, Compared::Gradients);
  plain_optimizer.step();
  parallel_optimizer.step();
  expect_equal_parameters(*plain, *parallel, Compared::Parameters);
}

struct StepOptions {
  int steps = 3;
  double lr = 0.1;
  std::function<at::Tensor(int step)> input;
  /// The whole of what the parallel module returned. None: it is whole.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& expected)> gathered = {};
};

/// Both learn by SGD to make the squares of their outputs small; outputs must be equal in every
/// step.
template <class M>
void expect_equal_steps(M& plain, const std::vector<at::Tensor>& plain_parameters, M& parallel,
                        const std::vector<at::Tensor>& parallel_parameters,
                        const StepOptions& options) {
  torch::optim::SGD plain_optimizer(plain_parameters, options.lr);
  torch::optim::SGD parallel_optimizer(parallel_parameters, options.lr);
  for (int step = 0; step < options.steps; ++step) {
    const auto x = options.input(step);
    const auto expected = plain(x);
    auto output = parallel(x);
    if (options.gathered) output = options.gathered(output, expected);
    expect_equal(output, expected, c10::str("output of step ", step));
    plain_optimizer.zero_grad();
    parallel_optimizer.zero_grad();
    expected.square().sum().backward();
    output.square().sum().backward();
    plain_optimizer.step();
    parallel_optimizer.step();
  }
}

}  // namespace tessera::testing
