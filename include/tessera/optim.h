#pragma once

#include <tessera/optim/grad_scaler.h>

#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
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
};

using ParamGroup = torch::optim::OptimizerParamGroup;
/// Parameters with options of their own, which are complete: nothing is inherited. A group made
/// without options has the optimizer's.
ParamGroup param_group(std::vector<at::Tensor> params, SGDOptions options);
ParamGroup param_group(std::vector<at::Tensor> params, AdamOptions options);
ParamGroup param_group(std::vector<at::Tensor> params, AdamWOptions options);

/// What an optimizer keeps for one parameter, by Python's names: "step", "exp_avg", …
using State = std::map<std::string, at::Tensor>;

/// What SGD, Adam and AdamW share. torch::optim's schedulers work on it: options are read at every
/// step. Parameters without a gradient are left alone.
class Optimizer : public torch::optim::Optimizer {
 public:
  Optimizer(Optimizer&&) noexcept;
  Optimizer& operator=(Optimizer&&) noexcept;
  ~Optimizer() override;

  /// One update; with a closure, first evaluates it (gradients on) and returns its loss.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// One update if `found_inf`, a float32 number, is 0. If it is 1 nothing changes, step counts
  /// included. The device decides, so no host waits for it. For fused kernels alone.
  void step_unless(const at::Tensor& found_inf);
  void zero_grad(bool set_to_none = true);
  void add_param_group(const ParamGroup& group);

  /// Empty before the parameter's first step. Valid until the next load.
  const State& state_of(const at::Tensor& parameter) const;
  /// Copies `state`, as state_of() gives it, to the parameter's dtype and device; tensors that are
  /// there already keep their place in memory. An empty one forgets.
  void load_state_of(const at::Tensor& parameter, const State& state);

  /// For torch::save and torch::load: options and state, parameters by their position, in the
  /// format of torch::optim's optimizers of the same name, which read it and are read. An archive
  /// that does not fit is a ValueError, and changes nothing.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  /// Expires when the optimizer is destroyed, moved from or assigned to.
  std::weak_ptr<const void> lifetime() const;
  class Rule;

 protected:
  Optimizer(const std::vector<ParamGroup>& groups, std::unique_ptr<Rule> rule,
            std::unique_ptr<torch::optim::OptimizerOptions> defaults);
  torch::optim::OptimizerOptions& options_of(size_t group);

 private:
  friend class GradScaler;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

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
