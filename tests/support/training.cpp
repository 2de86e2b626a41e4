#include "support/training.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace tessera::testing {

namespace {

/// Never the default generator: thread ranks share it.
at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

using Transform = std::function<at::Tensor(const at::Tensor&)>;
at::Tensor apply(const Transform& transform, const at::Tensor& tensor) {
  return transform ? transform(tensor) : tensor;
}

std::vector<at::Tensor> tensors(const Trainee& trainee) {
  std::vector<at::Tensor> result;
  for (const auto& [name, tensor] : trainee.parameters) result.push_back(tensor);
  return result;
}

void compare_parameters(const Trainee& reference, const Trainee& parallel, const Transform& full,
                        std::optional<Tolerance> tolerance, const std::string& when) {
  ASSERT_EQ(parallel.parameters.size(), reference.parameters.size()) << "number of parameters";
  const at::NoGradGuard no_grad;
  for (size_t index = 0; index < reference.parameters.size(); ++index) {
    const auto& [name, expected] = reference.parameters[index];
    expect_equal(apply(full, parallel.parameters[index].second), expected,
                 "parameter " + name + " " + when, tolerance);
  }
}

at::Tensor rows_of_rank(const at::Tensor& batch, const Group& group) {
  const int64_t ranks = world_size(group);
  TORCH_CHECK_VALUE(batch.size(0) % ranks == 0,
                    "expect_training_parity: expected a global batch that ", ranks,
                    " ranks can share equally, got ", batch.size(0), " rows");
  return batch.chunk(ranks, 0)[rank(group)];
}

/// Draws inputs and computes losses the way the options say.
class TrainingComparison {
 public:
  TrainingComparison(const Trainee& reference, const Trainee& parallel,
                     const TrainingOptions& options)
      : reference_(reference),
        parallel_(parallel),
        options_(options),
        reference_optimizer_(options.optimizer(tensors(reference))),
        parallel_optimizer_(options.optimizer(tensors(parallel))) {}

  void step(int number) {
    const at::Tensor input = draw(number);
    const at::Tensor parallel_input =
        options_.local_batch_of ? rows_of_rank(input, *options_.local_batch_of) : input;
    const at::Tensor parallel_loss = loss(parallel_.forward(parallel_input));
    const at::Tensor reference_loss = loss(reference_.forward(input));
    expect_equal(comparable(parallel_loss), reference_loss.detach(),
                 "loss of step " + std::to_string(number), options_.tolerance);
    update(parallel_loss, *parallel_optimizer_);
    update(reference_loss, *reference_optimizer_);
  }

 private:
  at::Tensor draw(int number) const {
    uint64_t seed = options_.seed * 1000 + number;
    if (!options_.same_inputs) seed += 1'000'000 * (1 + static_cast<uint64_t>(rank()));
    return at::randn(options_.input, generator(seed), at::TensorOptions());
  }

  at::Tensor loss(const at::Tensor& output) const {
    if (options_.loss) return options_.loss(output);
    return options_.local_batch_of ? output.square().mean() : output.sum();
  }

  at::Tensor comparable(const at::Tensor& parallel_loss) const {
    const at::Tensor value = apply(options_.full, parallel_loss).detach();
    return options_.local_batch_of ? all_reduce(value, ReduceOp::AVG, *options_.local_batch_of)
                                   : value;
  }

  void update(const at::Tensor& loss, torch::optim::Optimizer& optimizer) const {
    loss.backward();
    optimizer.step();
    optimizer.zero_grad(options_.zero_grad_to_none);
  }

  const Trainee& reference_;
  const Trainee& parallel_;
  const TrainingOptions& options_;
  std::unique_ptr<torch::optim::Optimizer> reference_optimizer_;
  std::unique_ptr<torch::optim::Optimizer> parallel_optimizer_;
};

/// Learning rate 1 without an optimizer, as in REQUIREMENTS.md 1.0.
void descend(const Trainee& trainee, const at::Tensor& input, const at::Tensor& target) {
  at::mse_loss(trainee.forward(input), target).backward();
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter] : trainee.parameters) {
    if (!parameter.requires_grad()) continue;
    ASSERT_TRUE(parameter.grad().defined()) << "parameter " << name << " got no gradient";
    at::Tensor handle = parameter;
    handle.sub_(parameter.grad());
    handle.mutable_grad() = at::Tensor();
  }
}

}  // namespace

OptimizerFactory sgd(double lr, double momentum, double weight_decay) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(
        std::move(parameters),
        torch::optim::SGDOptions(lr).momentum(momentum).weight_decay(weight_decay));
  };
}

OptimizerFactory adam(double lr) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::Adam>(std::move(parameters),
                                                torch::optim::AdamOptions(lr));
  };
}

OptimizerFactory adamw(double lr, double weight_decay) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::AdamW>(
        std::move(parameters), torch::optim::AdamWOptions(lr).weight_decay(weight_decay));
  };
}

void compare_training(const Trainee& reference, const Trainee& parallel,
                      const TrainingOptions& options) {
  TrainingComparison comparison(reference, parallel, options);
  for (int step = 0; step < options.steps; ++step) comparison.step(step);
  compare_parameters(reference, parallel, options.full, options.tolerance,
                     "after " + std::to_string(options.steps) + " steps");
}

void compare_data_parallel(const Trainee& reference, const Trainee& replicated,
                           const DataParallelOptions& options) {
  std::vector<int64_t> shape = options.sample;
  shape.insert(shape.begin(), world_size());
  at::Generator random = generator(1234);
  at::Tensor input = at::randn(shape, random, at::TensorOptions());
  const at::Tensor target = at::randn(shape, random, at::TensorOptions());
  for (int iteration = 0; iteration < options.iterations; ++iteration) {
    descend(reference, input, target);
    descend(replicated, input.narrow(0, rank(), 1), target.narrow(0, rank(), 1));
    compare_parameters(reference, replicated, options.full, options.tolerance,
                       "after iteration " + std::to_string(iteration));
    input = input.index_select(
        0, at::randperm(world_size(), generator(iteration), at::TensorOptions(at::kLong)));
  }
}

}  // namespace tessera::testing
