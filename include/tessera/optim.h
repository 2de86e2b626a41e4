#pragma once

#include <tessera/optim/adafactor.h>
#include <tessera/optim/averaging.h>
#include <tessera/optim/grad_scaler.h>
#include <tessera/optim/lr_scheduler.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/optimizer.h>

#include <optional>
#include <utility>
#include <vector>

/// Python PyTorch's optimizers on ATen's foreach and fused kernels, bit for bit as there.
namespace tessera::optim {

/// In Python's order. `foreach`, `fused`: which kernels; by default foreach if all parameters are
/// on an accelerator, else one parameter after the other. Fused is the fastest, on the CPU as well.
struct SGDOptions {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  std::optional<bool> foreach = std::nullopt, fused = std::nullopt;
};
struct AdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas = {0.9, 0.999};
  double eps = 1e-8, weight_decay = 0;
  bool amsgrad = false;
  std::optional<bool> foreach = std::nullopt;
  bool maximize = false;
  std::optional<bool> fused = std::nullopt;
  bool decoupled_weight_decay = false;  // true: AdamW
};
struct AdamWOptions {
  double lr = 1e-3;
  std::pair<double, double> betas = {0.9, 0.999};
  double eps = 1e-8, weight_decay = 1e-2;
  bool amsgrad = false, maximize = false;
  std::optional<bool> foreach = std::nullopt, fused = std::nullopt;
  /// Of what exp_avg and exp_avg_sq are made: none as the parameter, at::kBFloat16, at::kFloat, or
  /// at::kByte, which is 8 bits per element and a scale per 256, but for parameters of fewer than
  /// 4096 elements. The update is calculated in float32 and kernels are the loop's. It is no part
  /// of what is saved: any loads what any other has saved.
  std::optional<at::ScalarType> state_dtype = std::nullopt;
};

ParamGroup param_group(std::vector<at::Tensor> params, SGDOptions options);
ParamGroup param_group(std::vector<at::Tensor> params, AdamOptions options);
ParamGroup param_group(std::vector<at::Tensor> params, AdamWOptions options);

class SGD : public Optimizer {
 public:
  explicit SGD(std::vector<at::Tensor> params, SGDOptions options = {});
  explicit SGD(const std::vector<ParamGroup>& groups, SGDOptions defaults = {});
  /// Of one group, to read or change between steps.
  SGDOptions& options(size_t group = 0);
};
class Adam : public Optimizer {
 public:
  explicit Adam(std::vector<at::Tensor> params, AdamOptions options = {});
  explicit Adam(const std::vector<ParamGroup>& groups, AdamOptions defaults = {});
  AdamOptions& options(size_t group = 0);
};
class AdamW : public Optimizer {
 public:
  explicit AdamW(std::vector<at::Tensor> params, AdamWOptions options = {});
  explicit AdamW(const std::vector<ParamGroup>& groups, AdamWOptions defaults = {});
  AdamWOptions& options(size_t group = 0);
};

/// Norm of all (D)Tensors as one vector: plain, on the first one's device; a CPU's 0 if none.
at::Tensor get_total_norm(at::TensorList tensors, double norm_type = 2.0,
                          bool error_if_nonfinite = false,
                          std::optional<bool> foreach = std::nullopt);
/// Scales gradients in place to a total norm of at most `max_norm`; gives their get_total_norm.
at::Tensor clip_grad_norm_(  // NOLINT(readability-identifier-naming): Python's name
    at::TensorList parameters, double max_norm, double norm_type = 2.0,
    bool error_if_nonfinite = false, std::optional<bool> foreach = std::nullopt);
/// Clamps gradients in place to [-clip_value, clip_value].
void clip_grad_value_(  // NOLINT(readability-identifier-naming)
    at::TensorList parameters, double clip_value, std::optional<bool> foreach = std::nullopt);

}  // namespace tessera::optim
