#include "optim/peer_training.h"

#include "support/peer.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/schedulers/step_lr.h>

namespace tessera::testing {

namespace {

constexpr int kSteps = 50;

/// `inputs` has x and y of every step.
constexpr const char* kTrain = R"(
def keep(name, params, optimizer):
    for i, p in enumerate(params):
        outputs[f"{name}/{i}"] = p
        for key, value in optimizer.state.get(p, {}).items():
            outputs[f"{name}/{i}/{key}"] = value.to_dense() if value.is_sparse else value

def train(name, make, dtype, clip, step_lr):
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3)).to(dtype)
    params = list(net.parameters())
    optimizer = make(params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_lr, gamma=0.3) if step_lr else None
    for x, y in zip(inputs["x"].to(dtype), inputs["y"].to(dtype)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        if clip is not None:
            outputs[f"{name}/norm"] = torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    keep(name, params, optimizer)

def drive(name, make):
    params = [inputs[f"p{i}"].clone().requires_grad_() for i in range(len(inputs["first"]))]
    optimizer = make(params)
    for step in range(len(inputs["g0"])):
        for i, p in enumerate(params):
            p.grad = inputs[f"g{i}"][step].clone() if step >= inputs["first"][i] else None
        optimizer.step()
    keep(name, params, optimizer)
)";

std::string python_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "torch.float32";
    case at::kDouble:
      return "torch.float64";
    case at::kBFloat16:
      return "torch.bfloat16";
    default:
      throw std::invalid_argument("no such case");
  }
}

std::string train_call(const PeerCase& one) {
  return "train('" + one.name + "', lambda params: " + one.python + ", " + python_name(one.dtype) +
         ", " + (one.clip ? std::to_string(*one.clip) : "None") + ", " +
         std::to_string(one.step_lr) + ")\n";
}

void keep(Tensors& kept, const std::string& name, const std::vector<at::Tensor>& params,
          const optim::Optimizer& optimizer) {
  for (size_t i = 0; i < params.size(); ++i) {
    const std::string label = name + "/" + std::to_string(i);
    kept[label] = params[i].detach();
    for (const auto& [key, tensor] : optimizer.state_of(params[i]))
      kept[label + "/" + key] = tensor.is_sparse() ? tensor.to_dense() : tensor;
  }
}

void train(const PeerCase& one, const Tensors& inputs, Tensors& kept) {
  auto net = seeded(7, [] {
    const torch::nn::Linear first(7, 33);  // in Python's order, which arguments would not be in
    const torch::nn::Linear second(33, 3);
    return torch::nn::Sequential(first, torch::nn::Tanh(), second);
  });
  net->to(one.dtype);
  const std::vector<at::Tensor> params = net->parameters();
  const auto optimizer = one.make(params);
  std::unique_ptr<torch::optim::StepLR> scheduler;
  if (one.step_lr > 0) {
    scheduler = std::make_unique<torch::optim::StepLR>(*optimizer, one.step_lr, 0.3);
    scheduler->step();  // Python's constructor takes this one
  }
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    torch::nn::functional::mse_loss(net->forward(inputs.at("x")[step].to(one.dtype)),
                                    inputs.at("y")[step].to(one.dtype))
        .backward();
    if (one.clip) kept[one.name + "/norm"] = optim::clip_grad_norm_(params, *one.clip);
    optimizer->step();
    if (scheduler) scheduler->step();
  }
  keep(kept, one.name, params, *optimizer);
}

void drive(const PeerCase& one, const DrivenParameters& parameters, Tensors& kept) {
  std::vector<at::Tensor> params;
  for (const at::Tensor& value : parameters.values)
    params.push_back(value.detach().clone().set_requires_grad(true));
  const auto optimizer = one.make(params);
  for (int64_t step = 0; step < parameters.gradients[0].size(0); ++step) {
    for (size_t i = 0; i < params.size(); ++i) {
      const bool has = parameters.first.empty() || step >= parameters.first[i];
      params[i].mutable_grad() = has ? parameters.gradients[i][step].clone() : at::Tensor();
    }
    optimizer->step();
  }
  keep(kept, one.name, params, *optimizer);
}

void compare(const std::string& script, const Tensors& inputs, const Tensors& kept) {
  const PeerResult result = run_peer(script, inputs);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.tensors.size(), kept.size());
  for (const auto& [name, tensor] : result.tensors) {
    const auto found = kept.find(name);
    if (found == kept.end()) {
      ADD_FAILURE() << "Python has " << name << ", the optimizer here has not";
    } else {
      expect_bitwise_equal(found->second, tensor, name);
    }
  }
}

}  // namespace

void expect_training_as_in_python(const std::vector<PeerCase>& cases) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  at::manual_seed(3);
  const Tensors inputs{{"x", at::randn({kSteps, 8, 7})}, {"y", at::randn({kSteps, 8, 3})}};
  std::string script = kTrain;
  Tensors kept;
  for (const PeerCase& one : cases) {
    script += train_call(one);
    train(one, inputs, kept);
  }
  compare(script, inputs, kept);
}

void expect_driving_as_in_python(const DrivenParameters& parameters,
                                 const std::vector<PeerCase>& cases) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  Tensors inputs{{"first", parameters.first.empty()
                               ? at::zeros({static_cast<int64_t>(parameters.values.size())})
                               : at::tensor(parameters.first)}};
  for (size_t i = 0; i < parameters.values.size(); ++i) {
    inputs[c10::str("p", i)] = parameters.values[i];
    inputs[c10::str("g", i)] = parameters.gradients[i];
  }
  std::string script = kTrain;
  Tensors kept;
  for (const PeerCase& one : cases) {
    script += "drive('" + one.name + "', lambda params: " + one.python + ")\n";
    drive(one, parameters, kept);
  }
  compare(script, inputs, kept);
}

}  // namespace tessera::testing
