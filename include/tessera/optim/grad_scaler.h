#pragma once

#include <tessera/comm.h>

#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

struct GradScalerOptions {
  c10::DeviceType device = c10::DeviceType::CUDA;
  double init_scale = 65536, growth_factor = 2, backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  bool enabled = true;                        // false: everything passes through
  std::optional<Group> group = std::nullopt;  // its ranks skip steps together, each calls them all
};

/// Scales losses so that half-precision gradients do not vanish, and skips steps whose gradients
/// are not finite: scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update();
class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});
  ~GradScaler();
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);
  /// Divides the gradients by the scale, for clipping between it and step(). Once per step.
  void unscale_(torch::optim::Optimizer& optimizer);  // NOLINT(readability-identifier-naming)
  /// `found_inf`, a float32 number that all ranks have: 1 leaves the step out as gradients that are
  /// not finite do. With this library's fused optimizers no host waits.
  void step(torch::optim::Optimizer& optimizer, const at::Tensor& found_inf = {});
  void update(std::optional<double> new_scale = std::nullopt);
  double get_scale() const;  // waits for the device
  bool is_enabled() const;
  /// By Python's names; between update() and the next scale().
  std::map<std::string, double> state_dict() const;
  void load_state_dict(const std::map<std::string, double>& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::optim
