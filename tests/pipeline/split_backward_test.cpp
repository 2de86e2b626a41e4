// Backward in two parts gives the gradients of one, and computes nothing twice.
#include "pipeline/split_backward.h"

#include <tessera/checkpoint.h>
#include <tessera/nn.h>

#include "support/tolerance.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>

namespace tessera::testing {
namespace {

using detail::pipeline::SplitBackward;
using Function = std::function<at::Tensor(const at::Tensor&)>;

std::vector<at::Tensor> leaves(const at::Tensor& input, const std::vector<at::Tensor>& parameters) {
  auto all = parameters;
  all.insert(all.begin(), input);
  return all;
}

void expect_as_one(const Function& function, const at::Tensor& input,
                   const std::vector<at::Tensor>& parameters) {
  const auto all = leaves(input, parameters);
  const auto gradient = torch::randn_like(function(input));
  function(input).backward(gradient);
  std::vector<at::Tensor> expected;
  for (auto& leaf : all) {
    expected.push_back(leaf.grad());
    leaf.mutable_grad() = at::Tensor();
  }
  SplitBackward split;
  const auto of_input = split.backward_input(function(input), gradient, input);
  for (const auto& parameter : parameters)
    EXPECT_FALSE(parameter.grad().defined()) << "no parameter has a gradient after the first part";
  split.backward_weight();
  if (expected[0].defined())
    expect_equal(of_input, expected[0], "input");
  else
    EXPECT_FALSE(of_input.defined());
  for (size_t i = 1; i < all.size(); ++i)
    expect_equal(all[i].grad(), expected[i], std::to_string(i));
}

at::Tensor input(at::IntArrayRef sizes) { return torch::randn(sizes, torch::requires_grad()); }

TEST(SplitBackward, OfLayersGivesTheGradientsOfOneBackward) {
  nn::Sequential net(nn::Linear(4, 6), nn::ReLU(), nn::LayerNorm(std::vector<int64_t>{6}),
                     nn::Linear(6, 3));
  expect_as_one([&](const auto& x) { return net->forward(x); }, input({5, 4}), net->parameters());
}

TEST(SplitBackward, OfConvolutionsAndResidualsDoesSo) {
  nn::Conv2d one(torch::nn::Conv2dOptions(2, 2, 3).padding(1)),
      two(torch::nn::Conv2dOptions(2, 2, 1));
  nn::BatchNorm2d norm(2);
  std::vector<at::Tensor> parameters;
  for (const auto& list : {one->parameters(), two->parameters(), norm->parameters()})
    parameters.insert(parameters.end(), list.begin(), list.end());
  expect_as_one([&](const auto& x) { return x + two(norm(at::gelu(one(x)) + x)); },
                input({2, 2, 5, 5}), parameters);
}

TEST(SplitBackward, OfAWeightThatIsUsedTwiceAddsItUpOnce) {
  nn::Linear layer(4, 4);
  expect_as_one([&](const auto& x) { return layer(at::tanh(layer(x))) + layer(x); }, input({3, 4}),
                layer->parameters());
  const auto weight = torch::randn({4, 4}, torch::requires_grad());
  expect_as_one([&](const auto& x) { return at::mm(at::mm(x, weight), weight.t() * weight); },
                input({3, 4}), {weight});
}

TEST(SplitBackward, OfWhatDoesNotDependOnTheInputIsLeftToTheSecondPart) {
  const auto weight = torch::randn({4}, torch::requires_grad());
  expect_as_one([&](const auto&) { return weight * 2; }, input({4}), {weight});
  expect_as_one([&](const auto& x) { return x * 2; }, input({4}), {});
  expect_as_one([&](const auto& x) { return x; }, input({4}), {});
}

TEST(SplitBackward, OfCheckpointedBlocksGivesTheSameGradients) {
  auto block = nn::Sequential(nn::Linear(4, 8), nn::Tanh(), nn::Linear(8, 4));
  checkpoint(block);
  expect_as_one([&](const auto& x) { return block->forward(x); }, input({3, 4}),
                block->parameters());
}

/// Products of matrices while it lives.
class CountProducts {
 public:
  CountProducts()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(
            [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
              const std::string name = call.name();
              if (name == "aten::mm" || name == "aten::addmm") ++count();
              return nullptr;
            }))) {
    count() = 0;
  }
  ~CountProducts() { at::removeCallback(handle_); }
  static int& count() {
    thread_local int products = 0;
    return products;
  }

 private:
  at::CallbackHandle handle_;
};

TEST(SplitBackward, ComputesEachProductOnce) {
  nn::Sequential net(nn::Linear(4, 6), nn::Tanh(), nn::Linear(6, 6), nn::Tanh(), nn::Linear(6, 3));
  const auto x = input({5, 4});
  const auto output = net->forward(x);
  SplitBackward split;
  const CountProducts products;
  split.backward_input(output, torch::ones_like(output), x);
  EXPECT_EQ(products.count(), 3) << "gradients of three inputs";
  split.backward_weight();
  EXPECT_EQ(products.count(), 6) << "and of three weights";
}

TEST(SplitBackward, FreesWhatTheSecondPartDoesNotNeed) {
  nn::Linear layer(4, 4);
  const auto x = input({5, 4});
  auto hidden = layer(x);
  auto output = hidden.exp();  // keeps its result for its own backward
  const auto result = output.storage().getWeakStorageImpl();
  SplitBackward split;
  split.backward_input(output, torch::ones_like(output), x);
  output = hidden = at::Tensor();
  EXPECT_TRUE(result.expired());
  split.backward_weight();
  EXPECT_TRUE(layer->weight.grad().defined());
}

}  // namespace
}  // namespace tessera::testing
