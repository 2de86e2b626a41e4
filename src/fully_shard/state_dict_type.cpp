#include <tessera/fully_shard/state_dict_type.h>

#include "fully_shard/state_impl.h"

#include <c10/util/Exception.h>

namespace tessera {
namespace {

const char* name_of(size_t type) {
  static constexpr const char* kNames[] = {"FULL_STATE_DICT", "LOCAL_STATE_DICT",
                                           "SHARDED_STATE_DICT"};
  return kNames[type];
}

const char* name_of(StateDictType type) { return name_of(static_cast<size_t>(type)); }

/// `given`, or the type's with its defaults.
template <class Config>
Config config_for(StateDictType type, const std::optional<Config>& given, const char* argument) {
  const auto index = static_cast<size_t>(type);
  if (given) {
    TORCH_CHECK(given->index() == index, "set_state_dict_type: expected as ", argument, " that of ",
                name_of(type), ", got that of ", name_of(given->index()),
                "; pass the class whose name begins like the type's, or none");
    return *given;
  }
  switch (type) {
    case StateDictType::FULL_STATE_DICT:
      return std::variant_alternative_t<0, Config>{};
    case StateDictType::LOCAL_STATE_DICT:
      return std::variant_alternative_t<1, Config>{};
    case StateDictType::SHARDED_STATE_DICT:
      return std::variant_alternative_t<2, Config>{};
  }
  TORCH_CHECK_VALUE(false, "set_state_dict_type: expected a StateDictType, got ", index);
}

StateDictSettings make_settings(StateDictType type, const std::optional<StateDictConfig>& config,
                                const std::optional<OptimStateDictConfig>& optim_config) {
  return {.type = type,
          .state_dict_config = config_for(type, config, "state_dict_config"),
          .optim_state_dict_config = config_for(type, optim_config, "optim_state_dict_config")};
}

}  // namespace

StateDictSettings set_state_dict_type(
    nn::ModuleRef module, StateDictType type,
    const std::optional<StateDictConfig>& state_dict_config,
    const std::optional<OptimStateDictConfig>& optim_state_dict_config) {
  return set_state_dict_type(module,
                             make_settings(type, state_dict_config, optim_state_dict_config));
}

StateDictSettings set_state_dict_type(nn::ModuleRef module, const StateDictSettings& settings) {
  // Checks those that were put together by hand.
  const auto checked =
      make_settings(settings.type, settings.state_dict_config, settings.optim_state_dict_config);
  const auto states = detail::fully_shard::states_in(*module, "set_state_dict_type");
  auto old = states[0]->state_dict_settings;
  for (const auto& state : states) state->state_dict_settings = checked;
  return old;
}

StateDictSettings get_state_dict_type(nn::ModuleRef module) {
  const auto states = detail::fully_shard::states_in(*module, "get_state_dict_type");
  const auto& first = *states[0];
  for (const auto& state : states) {
    TORCH_CHECK(state->state_dict_settings == first.state_dict_settings,
                "get_state_dict_type: expected one setting for all units in ", nn::name_of(*module),
                ", but ", first.name(), " has ", name_of(first.state_dict_settings.type), " and ",
                state->name(), " has ", name_of(state->state_dict_settings.type),
                state->state_dict_settings.type == first.state_dict_settings.type
                    ? " with another config"
                    : "",
                "; call set_state_dict_type on the whole");
  }
  return first.state_dict_settings;
}

struct StateDictTypeScope::Old {
  std::weak_ptr<detail::fully_shard::State> state;
  StateDictSettings settings;
};

StateDictTypeScope::StateDictTypeScope(
    nn::ModuleRef module, StateDictType type,
    const std::optional<StateDictConfig>& state_dict_config,
    const std::optional<OptimStateDictConfig>& optim_state_dict_config) {
  for (const auto& state : detail::fully_shard::states_in(*module, "StateDictTypeScope"))
    old_.push_back({state, state->state_dict_settings});
  set_state_dict_type(module, type, state_dict_config, optim_state_dict_config);
}

StateDictTypeScope::~StateDictTypeScope() {
  for (const auto& [state, settings] : old_) {
    if (const auto alive = state.lock()) alive->state_dict_settings = settings;
  }
}

}  // namespace tessera
