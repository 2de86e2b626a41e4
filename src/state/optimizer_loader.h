#pragma once

#include <tessera/state_dict.h>

#include "state/optimizer_kind.h"
#include "state/presentation.h"

#include <memory>
#include <string>
#include <vector>

namespace tessera::state {

/// Brings a dict into an optimizer, in two steps: what can be wrong shows in the first. The dict
/// has to outlive it.
class OptimizerLoader {
 public:
  /// Throws in the name of `function` if names or groups do not match.
  OptimizerLoader(const char* function, const torch::nn::Module& module,
                  torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict);

  /// Throws before anything is changed.
  void check() const;
  void load();

 private:
  using Group = OptimizerStateDict::Group;
  void check_state(const std::string& name, const at::Tensor& parameter, const Group& group) const;
  void check_value(const std::string& name, const std::string& field, const at::Tensor& parameter,
                   const at::Tensor& value) const;
  optim::State placed_state(const std::string& name, const at::Tensor& parameter) const;

  const char* function_;
  torch::optim::Optimizer& optimizer_;
  const OptimizerStateDict& dict_;
  std::unique_ptr<OptimizerKind> kind_;
  std::vector<std::vector<std::string>> names_;
  std::vector<const Group*> groups_;
  Presentation presentation_;
};

}  // namespace tessera::state
