#include "state/optimizer_state_dict.h"

#include <tessera/dtensor.h>
#include <tessera/state_dict.h>

#include "base/text.h"
#include "optim/options.h"
#include "optim/state.h"
#include "state/dict_values.h"
#include "state/holdings.h"
#include "state/optimizer_kind.h"
#include "state/state_dict.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <unordered_map>

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
  const state::StateDictForm form(*module, state::StateDictForm::Of::OptimizerState, kCaller);
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
        auto shown = is_number ? value.detach().clone() : form.show(parameter, value);
        if (shown.defined()) dict.state[names[g][i]][name] = std::move(shown);
      }
    }
  }
  return form.is_empty_here() ? OptimizerStateDict() : dict;
}

}  // namespace tessera

namespace tessera::state {
namespace {

constexpr const char* kNothing = "; nothing was loaded; ";

using DictGroup = OptimizerStateDict::Group;
using Names = std::vector<std::string>;

std::string list(const char* title, const Names& names) {
  return names.empty() ? "" : c10::str("; ", title, ": ", printable(c10::Join(", ", names)));
}

}  // namespace

OptimizerLoader::OptimizerLoader(const char* function, const torch::nn::Module& module,
                                 torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict,
                                 Covers covers, const std::string& file)
    : function_(function),
      where_(file.empty() ? function : c10::str(function, ": ", file)),
      optimizer_(optimizer),
      dict_(dict),
      kind_(kind_of(optimizer, function)),
      names_(named_groups(module, optimizer, function)),
      form_(module, StateDictForm::Of::OptimizerState, function) {
  match_groups(covers);
}

void OptimizerLoader::match_groups(Covers covers) {
  TORCH_CHECK_VALUE(dict_.kind.empty() || dict_.kind == kind_->name(), where_,
                    ": expected the state of ", kind_->name(), ", got that of ",
                    printable(dict_.kind), kNothing, "load it into an optimizer of that class");
  for (const auto& group : dict_.param_groups) {
    for (const auto& name : group.params)
      TORCH_CHECK_VALUE(given_.emplace(name, &group).second, where_, ": expected '",
                        printable(name), "' once among the parameters of all groups, got it twice",
                        kNothing, "correct the dict");
  }
  std::set<std::string> known;
  Names missing;
  for (const auto& names : names_) {
    known.insert(names.begin(), names.end());
    std::copy_if(names.begin(), names.end(), std::back_inserter(missing),
                 [&](const auto& name) { return covers == Covers::All && !given_.count(name); });
  }
  std::set<std::string> unexpected;
  for (const auto& [name, group] : given_)
    if (!known.count(name)) unexpected.insert(name);
  for (const auto& [name, values] : dict_.state)
    if (!known.count(name)) unexpected.insert(name);
  TORCH_CHECK_VALUE(missing.empty() && unexpected.empty(), where_,
                    ": expected the names of the optimizer's parameters", list("missing", missing),
                    list("unexpected", Names(unexpected.begin(), unexpected.end())), kNothing,
                    "make the optimizer of the same parameters, and pass the dict of all of them "
                    "on every rank");
  for (size_t g = 0; g < names_.size(); ++g) groups_.push_back(group_for(g));
}

/// The dict's group of an own one's parameters. Throws if they are in different ones.
const DictGroup* OptimizerLoader::group_for(size_t own) const {
  const std::string* first = nullptr;
  for (const auto& name : names_[own]) {
    if (!given_.count(name)) continue;
    if (first == nullptr) first = &name;
    TORCH_CHECK_VALUE(
        given_.at(name) == given_.at(*first), where_, ": expected the parameters of group ", own,
        " of the optimizer in one group of the dict, but '", *first, "' and '", name,
        "' are in different ones", kNothing, "make the optimizer with the same groups");
  }
  return first == nullptr ? nullptr : given_.at(*first);
}

void OptimizerLoader::check() const {
  for (size_t g = 0; g < names_.size(); ++g) {
    if (groups_[g] == nullptr) continue;
    const auto& own = optimizer_.param_groups()[g];
    (void)options_for(g);
    for (size_t i = 0; i < names_[g].size(); ++i) {
      if (given_.count(names_[g][i])) check_state(names_[g][i], own.params()[i], *groups_[g]);
    }
  }
}

/// Those of the optimizer's group with the dict's values. Throws if these do not fit.
std::unique_ptr<torch::optim::OptimizerOptions> OptimizerLoader::options_for(size_t own) const {
  return optim::loaded_options(c10::str(where_, ": group ", own),
                               optimizer_.param_groups()[own].options(), groups_[own]->options);
}

void OptimizerLoader::load() {
  for (size_t g = 0; g < names_.size(); ++g) {
    auto& own = optimizer_.param_groups()[g];
    if (groups_[g] != nullptr)
      optim::write_options(own.options(), optim::read_options(*options_for(g)));
    for (size_t i = 0; i < names_[g].size(); ++i) {
      if (given_.count(names_[g][i]) && !is_elsewhere(own.params()[i]))
        kind_->write(optimizer_, own.params()[i], placed_state(names_[g][i], own.params()[i]));
    }
  }
}

void OptimizerLoader::check_state(const std::string& name, const at::Tensor& parameter,
                                  const DictGroup& group) const {
  if (is_elsewhere(parameter)) return;
  const auto found = dict_.state.find(name);
  const bool has_state = found != dict_.state.end() && !found->second.empty();
  TORCH_CHECK_VALUE(has_state || !kind_->starts_with_state(), where_, ": expected state for '",
                    name, "', which ", kind_->name(), " has from the start, got none", kNothing,
                    "load the dict of the same kind of optimizer");
  if (!has_state) return;
  const auto known = kind_->state_names();
  for (const auto& [field, value] : found->second) {
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), field) != known.end(), where_,
                      ": expected state of ", c10::Join(", ", known), " for '", name, "', got '",
                      printable(field), "'", kNothing,
                      "load the dict of the same kind of optimizer");
    check_value(name, field, parameter, value);
  }
  auto required = kind_->required_names(parameter);
  const auto amsgrad = group.options.find("amsgrad");
  if (amsgrad != group.options.end() && amsgrad->second == true)
    required.emplace_back("max_exp_avg_sq");
  for (const auto& field : required) {
    TORCH_CHECK_VALUE(found->second.count(field), where_, ": expected '", field, "' for '", name,
                      "', got state without it", kNothing,
                      "load the dict of the same kind of optimizer");
  }
}

void OptimizerLoader::check_value(const std::string& name, const std::string& field,
                                  const at::Tensor& parameter, const at::Tensor& value) const {
  const bool is_distributed = value.defined() && is_dtensor(value);
  const std::vector<int64_t> sizes =
      is_distributed ? parameter.sizes().vec() : form_.plain_sizes(parameter);
  const auto unfit = optim::unfit_value(field, parameter, sizes, value);
  TORCH_CHECK_VALUE(!unfit, where_, ": expected '", field, "' of '", name, "' ", unfit->expected,
                    ", got ", unfit->got, kNothing, "load the state of the same parameters");
  if (field == "step") return;
  check_mesh(function_, name, parameter, value);
  check_packed(function_, name, parameter, value, form_.is_local(parameter));
}

optim::State OptimizerLoader::placed_state(const std::string& name,
                                           const at::Tensor& parameter) const {
  optim::State placed;
  const auto found = dict_.state.find(name);
  if (found == dict_.state.end()) return placed;
  for (const auto& [field, value] : found->second) {
    placed[field] = field == "step" ? value
                                    : placed_like(optim::placed_as_state(field, parameter), value,
                                                  form_.is_local(parameter));
  }
  return placed;
}

}  // namespace tessera::state

namespace tessera {

void load_optimizer_state_dict(nn::ModuleRef module, torch::optim::Optimizer& optimizer,
                               const OptimizerStateDict& dict) {
  const c10::AutoGradMode no_grad(false);
  state::OptimizerLoader loader("load_optimizer_state_dict", *module, optimizer, dict);
  loader.check();
  loader.load();
}

}  // namespace tessera
