#include "compiler/record/trial.h"

#include "compiler/record/random_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

namespace tessera::compiler {
Trial::Trial(std::vector<at::Tensor> written, std::vector<at::Tensor> parameters)
    : written_(std::move(written)),
      parameters_(std::move(parameters)),
      random_state_(random_state()) {
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
  set_random_state(random_state_);
}

void Trial::turn_gradients_around() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].mutable_grad() =
        gradients_[i].defined() ? at::Tensor() : at::zeros_like(parameters_[i]);
}

}  // namespace tessera::compiler
