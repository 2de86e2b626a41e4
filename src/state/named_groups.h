#pragma once

#include <torch/csrc/api/include/torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace tessera::state {

/// Names of the optimizer's parameters in the module, by group. Throws in the name of `function`
/// if it has others.
std::vector<std::vector<std::string>> named_groups(const torch::nn::Module& module,
                                                   const torch::optim::Optimizer& optimizer,
                                                   const char* function);

}  // namespace tessera::state
