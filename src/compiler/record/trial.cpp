#include "compiler/record/trial.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace tessera::compiler {

recompute::RandomState random_state_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Device> devices;
  for (const auto& tensor : tensors) {
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end())
      devices.push_back(tensor.device());
  }
  return recompute::RandomState::of(devices);
}

Trial::Trial(std::vector<at::Tensor> written, std::vector<at::Tensor> parameters)
    : written_(std::move(written)),
      parameters_(std::move(parameters)),
      random_state_(random_state_of(written_)) {
  const at::NoGradGuard no_grad;
  for (const auto& tensor : written_) copies_.push_back(tensor.clone());
  for (const auto& parameter : parameters_) {
    gradients_.push_back(parameter.grad());
    gradient_copies_.push_back(gradients_.back().defined() ? gradients_.back().clone()
                                                           : at::Tensor());
  }
}

void Trial::put_back() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < written_.size(); ++i) written_[i].copy_(copies_[i]);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (gradients_[i].defined()) gradients_[i].copy_(gradient_copies_[i]);
    parameters_[i].mutable_grad() = gradients_[i];
  }
  random_state_.restore();
}

void Trial::toggle_gradients() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].mutable_grad() =
        gradients_[i].defined() ? at::Tensor() : at::zeros_like(parameters_[i]);
}

}  // namespace tessera::compiler
