#include <tessera/dtensor.h>
#include <tessera/state_dict.h>

#include "optim/option_values.h"
#include "state/entries.h"
#include "state/named_groups.h"
#include "state/optimizer_kind.h"
#include "state/presentation.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace tessera {
namespace state {

std::vector<std::vector<std::string>> named_groups(const torch::nn::Module& module,
                                                   const torch::optim::Optimizer& optimizer,
                                                   const char* function) {
  const auto names = parameter_names(module);
  std::vector<std::vector<std::string>> groups;
  for (const auto& group : optimizer.param_groups()) {
    groups.emplace_back();
    for (const auto& parameter : group.params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(found != names.end(), function, ": expected an optimizer of parameters of ",
                        module.name(), ", but parameter ", groups.back().size(), " of its group ",
                        groups.size() - 1, ", of shape ", parameter.sizes(),
                        ", is not one of them; pass the module that has them all");
      groups.back().push_back(found->second);
    }
  }
  return groups;
}

}  // namespace state

OptimizerStateDict optimizer_state_dict(nn::ModuleRef module,
                                        const torch::optim::Optimizer& optimizer) {
  constexpr const char* kCaller = "optimizer_state_dict";
  const c10::AutoGradMode no_grad(false);
  const auto kind = state::kind_of(optimizer, kCaller);
  const auto names = state::named_groups(*module, optimizer, kCaller);
  const state::Presentation presentation(*module, state::Presentation::Of::OptimizerState, kCaller);
  OptimizerStateDict dict;
  dict.kind = kind->name();
  for (size_t g = 0; g < names.size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    dict.param_groups.push_back(
        {.params = names[g], .options = optim::read_options(group.options())});
    for (size_t i = 0; i < names[g].size(); ++i) {
      const auto& parameter = group.params()[i];
      for (const auto& [name, value] : kind->read(optimizer, parameter)) {
        // A number is the same on all ranks, and a copy, as what is gathered is.
        const bool is_number = name == "step";
        auto shown = is_number ? value.detach().clone() : presentation.show(parameter, value);
        if (shown.defined()) dict.state[names[g][i]][name] = std::move(shown);
      }
    }
  }
  return presentation.is_empty_here() ? OptimizerStateDict() : dict;
}

}  // namespace tessera
