#pragma once

#include <tessera/optim.h>

#include "base/capture.h"
#include "optim/amp_scaling.h"
#include "optim/plan.h"

#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::optim {

/// The learning rate of a group for one step.
class LearningRate {
 public:
  /// The tensors of one group that hold it, one per device and dtype.
  using Tensors = std::vector<std::shared_ptr<capture::HostNumber>>;
  LearningRate(const std::shared_ptr<Optimizer::Rule>& rule, size_t group,
               torch::optim::OptimizerOptions& options, Tensors& tensors)
      : rule_(rule), group_(group), options_(options), tensors_(tensors) {}

  double value() const { return options_.get_lr(); }
  /// For a step that is recorded: a 0-dim tensor that holds it, also in every run of the program.
  const at::Tensor& tensor(c10::Device device, at::ScalarType dtype) const;

 private:
  const std::shared_ptr<Optimizer::Rule>& rule_;
  const size_t group_;
  torch::optim::OptimizerOptions& options_;
  Tensors& tensors_;
};

/// How one kind of optimizer updates parameters.
class Optimizer::Rule {
 public:
  using Options = torch::optim::OptimizerOptions;

  virtual ~Rule() = default;
  virtual const char* name() const = 0;
  /// Names of state tensors, in the order of ParamBucket::state.
  virtual const std::vector<std::string>& state_names() const = 0;
  /// Also checks that the options are of this optimizer's type.
  virtual Demand demand(Options& options) const = 0;
  /// Zeros: state `name` of a parameter. Undefined if such parameters do not have it.
  virtual at::Tensor new_state(const std::string& name, const at::Tensor& parameter,
                               const Demand& demand) const = 0;
  /// False: the first update makes the state.
  virtual bool starts_with_state() const = 0;
  /// Whether a parameter of a group with such a demand may have the state.
  virtual bool may_have(const std::string& /*name*/, const Demand& /*demand*/) const {
    return true;
  }
  /// Throws if no step could take the parameter, `index` of a group with these options.
  virtual void check_parameter(Options& /*options*/, const at::Tensor& /*parameter*/,
                               size_t /*index*/) const {}
  /// Throws if these kernels can't take the parameter and its gradient.
  virtual void check(const at::Tensor& parameter, bool sparse, Kernels kernels) const = 0;
  /// For a recorder: a number that tells all options but the learning rate apart.
  virtual uint64_t fingerprint(Options& options) const = 0;
  virtual void update(ParamBucket& bucket, Options& options, const LearningRate& lr,
                      const AmpScaling& scaling) const = 0;

  /// Whether a complete state of the parameter has this one when it is saved.
  virtual bool is_saved(const std::string& /*name*/, const at::Tensor& /*parameter*/) const {
    return true;
  }
  /// State as it is saved.
  virtual State dense(const at::Tensor& /*parameter*/, const State& kept) const { return kept; }
  /// Puts a saved value into the state `name` of `into`, which is there.
  virtual void write(const std::string& name, const at::Tensor& /*parameter*/,
                     const at::Tensor& value, State& into) const {
    into.at(name).copy_(value);
  }

  // For a recorder: how often groups were added, and state was forgotten or exchanged.
  uint64_t groups_added = 0, states_exchanged = 0;
};

/// One number of several, by their bits.
template <class... Numbers>
uint64_t fingerprint_of(Numbers... numbers) {
  uint64_t hash = 0;
  const auto add = [&](double number) {
    uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof(bits));
    hash = (hash ^ bits) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 32U;
  };
  (add(static_cast<double>(numbers)), ...);
  return hash;
}

/// State of one parameter in libtorch's map.
struct ParamState final : torch::optim::OptimizerCloneableParamState<ParamState> {
  State tensors;
};

struct Optimizer::Impl {
  std::shared_ptr<bool> alive = std::make_shared<bool>();  // see lifetime()
  std::shared_ptr<Rule> rule;    // programs that were made of steps look whether it is still there
  std::vector<GroupPlan> plans;  // by parameter group
  std::deque<LearningRate::Tensors> rates;  // by parameter group
  AmpScaling scaling;                       // set for the length of one step

  /// Whether every group's kernels take an AmpScaling.
  bool all_fused(std::vector<ParamGroup>& groups) const;
  /// Index of the group that has the parameter.
  static std::optional<size_t> group_of(const std::vector<ParamGroup>& groups,
                                        const at::Tensor& parameter);
};

/// Throws in the name of `caller` unless `state` can be loaded for the parameter by a group of such
/// options: names and values fit, and all that is kept is there.
void check_state(const std::string& caller, const Optimizer::Rule& rule, const Demand& demand,
                 const at::Tensor& parameter, const State& state);

/// The learning rate as fused kernels take it in a step that is recorded: on the CPU any dtype; on
/// a GPU float32 beside the parameters, or, for float64, a number of the host, which is not
/// rounded.
const at::Tensor& fused_lr(const LearningRate& lr, const at::Tensor& parameter);
/// What fused kernels demand: floating point, a device they know, memory without gaps.
void check_fused(const char* optimizer, const at::Tensor& parameter, bool sparse);
/// Fused kernels walk through memory: gives every gradient its parameter's strides.
void match_strides(ParamBucket& bucket);
/// Fused kernels pass autograd by: counts their writes to parameters as it counts others.
void count_writes(at::TensorList params);

}  // namespace tessera::optim
