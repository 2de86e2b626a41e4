#include <tessera/dtensor.h>
#include <tessera/optim.h>

#include "optim/plan.h"

#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/ForeachUtils.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>

#include <algorithm>

namespace tessera::optim {

namespace {

using Tensors = std::vector<at::Tensor>;

Tensors gradients_of(at::TensorList parameters) {
  Tensors grads;
  grads.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters)
    if (parameter.grad().defined()) grads.push_back(parameter.grad());
  return grads;
}

bool same_kind(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.scalar_type() == tensors.front().scalar_type() &&
           tensor.device() == tensors.front().device();
  });
}

/// Calls `visit` with tensors of one device and dtype at a time, in the order of Python, where it
/// decides in which order norms are added up.
template <class Visit>
void for_each_kind(Tensors tensors, const Visit& visit) {
  if (tensors.empty()) return;
  if (same_kind(tensors)) return visit(tensors);
  std::vector<std::optional<at::Tensor>> optionals(tensors.begin(), tensors.end());
  const auto kinds = at::native::_group_tensors_by_first_tensors_device_and_dtype(
      {optionals}, /*with_indices=*/false);
  for (const auto& [kind, lists] : kinds) {
    Tensors members;
    for (const auto& tensor : lists.first[0]) members.push_back(*tensor);
    visit(members);
  }
}

bool use_lists(const char* caller, const Tensors& tensors, std::optional<bool> foreach) {
  const bool device_has = tensors.front().is_cpu() || on_accelerator(tensors.front());
  TORCH_CHECK(!foreach.value_or(false) || device_has, caller,
              ": expected foreach only where the device has list kernels, got tensors on ",
              tensors.front().device(), "; leave foreach out");
  return foreach.value_or(device_has && std::all_of(tensors.begin(), tensors.end(), is_plain));
}

/// Makes distributed scalars plain; those that are spread alike travel together.
void make_whole(Tensors& scalars) {
  std::vector<size_t> waiting;
  for (size_t i = 0; i < scalars.size(); ++i)
    if (is_dtensor(scalars[i])) waiting.push_back(i);
  while (!waiting.empty()) {
    const auto first = DTensor::of(scalars[waiting.front()]);
    std::vector<size_t> alike, others;
    Tensors parts;
    for (const size_t i : waiting) {
      const auto scalar = DTensor::of(scalars[i]);
      const bool is_alike = scalar.mesh() == first.mesh() &&
                            scalar.placements() == first.placements() &&
                            scalar.scalar_type() == first.scalar_type();
      (is_alike ? alike : others).push_back(i);
      if (is_alike) parts.push_back(scalar.to_local());
    }
    const auto whole =
        DTensor::from_local(at::stack(parts), first.mesh(), first.placements()).full_tensor();
    for (size_t k = 0; k < alike.size(); ++k)
      scalars[alike[k]] = whole.select(0, static_cast<int64_t>(k));
    waiting = std::move(others);
  }
}

at::Tensor total_norm_of(const char* caller, const Tensors& tensors, double norm_type,
                         bool error_if_nonfinite, std::optional<bool> foreach) {
  if (tensors.empty()) return at::scalar_tensor(0.0, at::kFloat);
  const c10::Device device = tensors.front().device();
  Tensors norms;
  for_each_kind(tensors, [&](const Tensors& members) {
    if (use_lists(caller, members, foreach)) {
      for (at::Tensor& norm : at::_foreach_norm(members, norm_type))
        norms.push_back(std::move(norm));
    } else {
      for (const at::Tensor& member : members)
        norms.push_back(at::linalg_vector_norm(member, norm_type));
    }
  });
  // Distributed and plain parameters may stand side by side; a norm is one number for all ranks.
  make_whole(norms);
  for (at::Tensor& norm : norms) norm = norm.to(device);
  at::Tensor total = at::linalg_vector_norm(at::stack(norms), norm_type);
  if (error_if_nonfinite) {
    TORCH_CHECK(std::isfinite(total.item<double>()), caller,
                ": expected a finite total norm of order ", norm_type, ", got ",
                total.item<double>(),
                ": some gradient is not finite; skip the step, or pass error_if_nonfinite = false "
                "to scale by it anyway");
  }
  return total;
}

/// The norm would be that of a part, and each rank would clip by its own.
void check_all_here(at::TensorList parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined() || !parameter.requires_grad() || !is_dtensor(parameter))
      continue;
    TORCH_CHECK_VALUE(DTensor::of(parameter).mesh().coordinate(),
                      "clip_grad_norm_: expected parameters of which this rank has a part, got one "
                      "of shape ",
                      parameter.sizes(), " that is on ", DTensor::of(parameter).mesh(),
                      "; of a pipeline's net, call clip_grad_norm_ of the Pipeline, which takes "
                      "all stages together");
  }
}

}  // namespace

at::Tensor get_total_norm(at::TensorList tensors, double norm_type, bool error_if_nonfinite,
                          std::optional<bool> foreach) {
  const at::NoGradGuard no_grad;
  return total_norm_of("get_total_norm", tensors.vec(), norm_type, error_if_nonfinite, foreach);
}

at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm, double norm_type,
                           bool error_if_nonfinite, std::optional<bool> foreach) {
  const at::NoGradGuard no_grad;
  const Tensors grads = gradients_of(parameters);
  check_all_here(parameters);
  const at::Tensor total =
      total_norm_of("clip_grad_norm_", grads, norm_type, error_if_nonfinite, foreach);
  // A multiplication by 1 where nothing is to be clipped: asking first would wait for the device.
  const at::Tensor factor = total.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0);
  for_each_kind(grads, [&](const Tensors& members) {
    const at::Tensor local = factor.to(members.front().device());
    if (use_lists("clip_grad_norm_", members, foreach)) {
      at::_foreach_mul_(members, local);
    } else {
      for (const at::Tensor& grad : members) grad.mul_(local);
    }
  });
  return total;
}

void clip_grad_value_(at::TensorList parameters, double clip_value, std::optional<bool> foreach) {
  const at::NoGradGuard no_grad;
  for_each_kind(gradients_of(parameters), [&](const Tensors& members) {
    if (use_lists("clip_grad_value_", members, foreach)) {
      at::_foreach_clamp_min_(members, -clip_value);
      at::_foreach_clamp_max_(members, clip_value);
    } else {
      for (const at::Tensor& grad : members) grad.clamp_(-clip_value, clip_value);
    }
  });
}

}  // namespace tessera::optim
