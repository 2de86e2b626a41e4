#include <tessera/serialize.h>

#include "optim/state.h"
#include "state/collective_section.h"
#include "state/files/folders.h"
#include "state/files/stored_checkpoint.h"
#include "state/holdings.h"
#include "state/optimizer_state_dict.h"
#include "state/optimizer_text.h"
#include "state/read_values.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <functional>
#include <optional>
#include <set>

namespace tessera {
namespace {

constexpr const char* kLoad = "load";

/// State of optimizers is stored under "optimizer/<parameter>/<field>"; fields have no slash.
std::pair<std::string, std::string> parameter_and_field(const std::string& name) {
  const auto begin = std::strlen(state::kOptimizerPrefix);
  const auto slash = name.rfind('/');
  if (slash < begin || slash == std::string::npos) return {name.substr(begin), ""};
  return {name.substr(begin, slash - begin), name.substr(slash + 1)};
}

/// Of which part a rank holds that holds this one of the parameter.
state::Holding holding_of_state(const std::string& field, const state::Holding& parameter) {
  const auto like = optim::placed_as_state(field, parameter.tensor);
  return state::hold(kLoad, parameter.name, like, parameter.tensor);
}

using Takes = std::function<bool(const std::string& parameter)>;

/// What is stored for an optimizer, of those parameters that `takes` names, with values placed as
/// the module's parameters are.
OptimizerStateDict read_optimizer(state::StoredCheckpoint& source, const torch::nn::Module& module,
                                  const std::string& dir, const Takes& takes) {
  TORCH_CHECK_VALUE(!source.index().optimizer.empty(), kLoad, ": ", dir,
                    ": expected a checkpoint with the state of an optimizer, got one that was "
                    "saved without; nothing was loaded; load the module alone");
  auto dict = state::parse_optimizer({kLoad, dir}, source.index().optimizer);
  for (auto& group : dict.param_groups)
    std::erase_if(group.params, [&](const std::string& name) { return !takes(name); });
  std::map<std::string, state::Holding> parameters;
  for (auto& holding : state::hold_module(kLoad, module).tensors) {
    auto name = holding.name;
    parameters.emplace(std::move(name), std::move(holding));
  }
  for (const auto& name : source.names()) {
    if (!name.starts_with(state::kOptimizerPrefix)) continue;
    const auto& stored = *source.find(name);
    const auto [parameter, field] = parameter_and_field(name);
    if (!takes(parameter)) continue;
    const auto found = parameters.find(parameter);
    if (found != parameters.end() && state::is_elsewhere(found->second.tensor)) continue;
    const bool is_placed = found != parameters.end() && field != "step" &&
                           stored.shape == optim::state_sizes(field, found->second.shape);
    dict.state[parameter][field] =
        is_placed ? state::read_part_of(source, stored, holding_of_state(field, found->second))
                  : state::read_whole(source, stored);
  }
  return dict;
}

/// Of the optimizer's parameters.
std::set<std::string> names_in(const torch::nn::Module& module,
                               const torch::optim::Optimizer& optimizer) {
  std::set<std::string> names;
  for (const auto& group : state::named_groups(module, optimizer, kLoad))
    names.insert(group.begin(), group.end());
  return names;
}

/// One load, up to the point from which on nothing can go wrong.
struct Prepared {
  std::optional<state::ModuleValues> values;
  OptimizerStateDict dict;
  std::optional<state::OptimizerLoader> loader;
  Extra extra;
};

void prepare(const std::string& given, const torch::nn::Module& module,
             torch::optim::Optimizer* optimizer, const CheckpointLoadOptions& options,
             const state::CollectiveSection& ranks, Prepared& prepared) {
  const auto dir = state::clean_path(kLoad, given);
  state::StoredCheckpoint source(kLoad, dir);
  auto& values = prepared.values.emplace(kLoad, module, source, /*converts=*/false);
  TORCH_CHECK_VALUE(!options.strict || values.differences().empty(), kLoad, ": ", dir.string(),
                    ": expected the names, shapes and dtypes of ", module.name(),
                    values.differences().to_string(),
                    "; nothing was loaded; load it into the model it was saved from, or what fits "
                    "with {.strict = false}");
  values.read(source);
  if (optimizer != nullptr) {
    // A parameter that keeps its value keeps what the optimizer has gathered for it.
    const auto owned = options.strict ? std::set<std::string>() : names_in(module, *optimizer);
    prepared.dict = read_optimizer(source, module, dir.string(), [&](const std::string& name) {
      return options.strict || (owned.count(name) != 0 && values.fits(name));
    });
    using Covers = state::OptimizerLoader::Covers;
    prepared.loader
        .emplace(kLoad, module, *optimizer, prepared.dict,
                 options.strict ? Covers::All : Covers::Some, dir.string())
        .check();
  }
  const bool same_ranks = source.index().files.size() == static_cast<size_t>(ranks.size());
  prepared.extra = source.read_extra(same_ranks ? static_cast<size_t>(ranks.rank()) : 0);
}

Extra load_checkpoint(const std::string& dir, const torch::nn::Module& module,
                      torch::optim::Optimizer* optimizer, const CheckpointLoadOptions& options) {
  const c10::AutoGradMode no_grad(false);
  const state::CollectiveSection ranks(options.group);
  Prepared prepared;
  ranks.run(
      kLoad,
      [&] {
        prepare(dir, module, optimizer, options, ranks, prepared);
        return std::string();
      },
      dir);
  prepared.values->apply();
  if (prepared.loader) prepared.loader->load();
  return std::move(prepared.extra);
}

}  // namespace

Extra load(const std::string& dir, nn::ModuleRef module, CheckpointLoadOptions options) {
  return load_checkpoint(dir, *module, nullptr, options);
}

Extra load(const std::string& dir, nn::ModuleRef module, torch::optim::Optimizer& optimizer,
           CheckpointLoadOptions options) {
  return load_checkpoint(dir, *module, &optimizer, options);
}

}  // namespace tessera
