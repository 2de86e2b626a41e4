#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {

/// What is trained: a forward and its parameters. Made from a holder, a shared_ptr or a module by
/// trainee(), which keeps a reference to it; by hand for anything else that maps tensor to tensor.
struct Trainee {
  std::function<at::Tensor(const at::Tensor&)> forward;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

template <class M>
concept Holder = requires { typename M::ContainedType; };

inline Trainee trainee(const Trainee& given) { return given; }

template <std::derived_from<torch::nn::Module> Module>
Trainee trainee(Module& module) {
  Trainee result;
  result.forward = [&module](const at::Tensor& input) { return module.forward(input); };
  for (const auto& item : module.named_parameters()) {
    result.parameters.emplace_back(item.key(), item.value());
  }
  return result;
}

template <class Module>
Trainee trainee(const std::shared_ptr<Module>& module) {
  return trainee(*module);
}

template <Holder H>
Trainee trainee(const H& holder) {
  return trainee(*holder.ptr());
}

}  // namespace tessera::testing
