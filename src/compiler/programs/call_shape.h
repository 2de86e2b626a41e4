#pragma once

#include <tessera/compile/step.h>

namespace tessera::compiler {

/// What a recording was made with, as far as it can be told from a call.
struct CallShape {
  struct TensorShape {
    ValueType type;
    bool requires_grad;
    bool is_defined;
    bool is_conj = false, is_neg = false;
    bool has_history = false;  // of autograd
    at::Layout layout = at::kStrided;
    uint64_t distribution = 0;  // of a distributed tensor, 0 of others
    int shares_with = -1;       // the first argument in the same storage
    int64_t distance = 0;       // from its first element
    bool operator==(const TensorShape&) const = default;
  };
  std::vector<TensorShape> tensors;
  std::vector<uint64_t> numbers;
  std::vector<const void*> objects;  // modules and optimizers
  bool grad_mode = true;
  at::ScalarType default_dtype = at::kFloat;
  std::vector<int> autocast;            // by device type: off, or the dtype
  std::vector<double> hyperparameters;  // of optimizers that are not ours, whose numbers are fixed
  std::vector<bool> training;           // of every module below those given
  std::vector<const void*> parameters;  // and theirs

  bool operator==(const CallShape&) const = default;
};
/// The tensors given, of distributed ones this rank's parts.
std::vector<at::Tensor> local_tensors(const detail::StepArguments& given);
CallShape shape_of(const detail::StepArguments& given,
                   const std::vector<torch::nn::Module*>& modules,
                   const std::vector<torch::optim::Optimizer*>& optimizers);
/// What tells the parameters of these modules themselves from others in their place.
std::vector<const void*> parameters_of(const std::vector<torch::nn::Module*>& modules);
/// In what two calls differ, for a user; empty if in nothing.
std::string difference(const CallShape& before, const CallShape& after);

}  // namespace tessera::compiler
