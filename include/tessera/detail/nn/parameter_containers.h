#pragma once

#include <torch/csrc/api/include/torch/nn/modules/container/parameterdict.h>
#include <torch/csrc/api/include/torch/nn/modules/container/parameterlist.h>
#include <torch/csrc/api/include/torch/nn/pimpl.h>

/// ParameterList and ParameterDict that can be cloned; torch::nn's can't, their reset() leaves them
/// empty.
namespace tessera::nn {

namespace detail {

template <class Container>
class Copied : public Container {
 public:
  using Container::Container;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override {
    auto copy = std::make_shared<Copied>();
    for (const auto& item : this->named_parameters(/*recurse=*/false)) {
      const auto& parameter = item.value();
      const auto copied = parameter.detach().to(device.value_or(parameter.device()),
                                                /*non_blocking=*/false, /*copy=*/true);
      copy->register_parameter(item.key(), copied, parameter.requires_grad());
    }
    copy->train(this->is_training());
    return copy;
  }
};

}  // namespace detail

TORCH_MODULE_IMPL(ParameterList, detail::Copied<torch::nn::ParameterListImpl>);
TORCH_MODULE_IMPL(ParameterDict, detail::Copied<torch::nn::ParameterDictImpl>);

}  // namespace tessera::nn
