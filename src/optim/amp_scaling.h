#pragma once

#include <ATen/Tensor.h>

#include <optional>
#include <utility>

namespace tessera::optim {

/// On its way to a device; on the CPU, where the host reads it, it is there.
inline at::Tensor to_device(const at::Tensor& tensor, c10::Device device) {
  return tensor.to(tensor.options().device(device), /*non_blocking=*/!device.is_cpu());
}

/// Handed to fused kernels by a GradScaler or step_unless: they divide gradients by `grad_scale`
/// and do nothing if `found_inf` is not 0. Undefined: no scaling.
struct AmpScaling {
  at::Tensor grad_scale;
  at::Tensor found_inf;

  /// As arguments of a kernel on this device.
  std::optional<at::Tensor> grad_scale_on(c10::Device device) const;
  std::optional<at::Tensor> found_inf_on(c10::Device device) const;
};

/// Hands the scaling to an optimizer for one step.
class AmpScalingScope {
 public:
  AmpScalingScope(AmpScaling& place, AmpScaling scaling) : place_(place) {
    place_ = std::move(scaling);
  }
  ~AmpScalingScope() { place_ = {}; }
  AmpScalingScope(const AmpScalingScope&) = delete;
  AmpScalingScope& operator=(const AmpScalingScope&) = delete;

 private:
  AmpScaling& place_;
};

}  // namespace tessera::optim
