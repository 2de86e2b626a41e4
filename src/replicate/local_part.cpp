#include "replicate/local_part.h"

#include "dtensor/redistribute.h"

namespace tessera::detail::replicate {

using dtensor::has_part;
using dtensor::part_of;

at::Tensor local_part(const at::Tensor& tensor) {
  return has_part(tensor) ? part_of(tensor).local() : tensor;
}

at::Tensor local_gradient(const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (!gradient.defined() || !has_part(parameter)) return gradient;
  const auto& spec = part_of(parameter).spec;
  if (part_of(gradient).spec->id != spec->id)
    parameter.mutable_grad() = dtensor::redistributed("replicate", gradient, spec);
  return part_of(parameter.grad()).local();
}

at::Tensor gradient_of_part(const at::Tensor& parameter, at::Tensor part) {
  if (!has_part(parameter)) return part;
  return dtensor::wrap(std::move(part), part_of(parameter).spec, parameter.sizes(),
                       parameter.strides());
}

}  // namespace tessera::detail::replicate
