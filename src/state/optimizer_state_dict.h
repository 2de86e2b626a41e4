#pragma once

#include <tessera/state_dict.h>

#include "state/dict_values.h"
#include "state/optimizer_kind.h"

#include <torch/csrc/api/include/torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::state {

/// Names of the optimizer's parameters in the module, by group. Throws in the name of `function`
/// if it has others.
std::vector<std::vector<std::string>> named_groups(const torch::nn::Module& module,
                                                   const torch::optim::Optimizer& optimizer,
                                                   const char* function);

/// Brings a dict into an optimizer, in two steps: what can be wrong shows in the first. The dict
/// has to outlive it.
class OptimizerLoader {
 public:
  /// Whose state the dict has: all of the optimizer's parameters, or some, while the others keep
  /// what they have.
  enum class Covers { All, Some };

  /// Throws in the name of `function`, and of the file that the dict is from, if the kind, names or
  /// groups do not match.
  OptimizerLoader(const char* function, const torch::nn::Module& module,
                  torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict,
                  Covers covers = Covers::All, const std::string& file = "");

  /// Throws before anything is changed.
  void check() const;
  void load();

 private:
  using Group = OptimizerStateDict::Group;
  void match_groups(Covers covers);
  std::unique_ptr<torch::optim::OptimizerOptions> options_for(size_t own) const;
  const Group* group_for(size_t own) const;
  void check_state(const std::string& name, const at::Tensor& parameter, const Group& group) const;
  void check_value(const std::string& name, const std::string& field, const at::Tensor& parameter,
                   const at::Tensor& value) const;
  optim::State placed_state(const std::string& name, const at::Tensor& parameter) const;

  const char* function_;
  std::string where_;  // how messages about the dict begin
  torch::optim::Optimizer& optimizer_;
  const OptimizerStateDict& dict_;
  std::unique_ptr<OptimizerKind> kind_;
  std::vector<std::vector<std::string>> names_;
  std::unordered_map<std::string, const Group*> given_;  // the dict's groups by parameter
  std::vector<const Group*> groups_;  // of the dict, by the optimizer's; null: no parameter of it
  StateDictForm form_;
};

}  // namespace tessera::state
