#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/nn/module.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::state {

/// A tensor of a module that is saved.
struct Entry {
  std::string name;
  at::Tensor tensor;  // itself, not an alias
  bool is_parameter;
};

/// Of the module and its parts, in Python's order: parameters, persistent buffers, children.
std::vector<Entry> entries_of(const torch::nn::Module& module);

/// Names of parameters by identity; of one with several, the first.
std::unordered_map<const at::TensorImpl*, std::string> parameter_names(
    const torch::nn::Module& module);

}  // namespace tessera::state
