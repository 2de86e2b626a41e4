#pragma once

#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace tessera::optim {

/// Made by param_group(params, options): parameters with options of their own, which are complete,
/// nothing is inherited. A group made without options has the optimizer's.
using ParamGroup = torch::optim::OptimizerParamGroup;

/// What an optimizer keeps for one parameter, by Python's names: "step", "exp_avg", …
using State = std::map<std::string, at::Tensor>;

/// What all optimizers here share. torch::optim's schedulers work on it: options are read at every
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
  /// What is saved: state in 8 bits as float32, in the parameter's shape and placed as it.
  State dense_state_of(const at::Tensor& parameter) const;
  /// Copies `state`, as either of them gives it, to the dtype and device of this optimizer's;
  /// tensors that are there already keep their place in memory. An empty one forgets.
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

}  // namespace tessera::optim
