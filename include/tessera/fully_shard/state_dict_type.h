#pragma once

#include <tessera/nn/module_ref.h>

#include <memory>
#include <optional>
#include <variant>
#include <vector>

namespace tessera {

/// In what form state_dict and optimizer_state_dict give what belongs to the parameters of fully
/// sharded units. Units of NO_SHARD have no shards: they give whole tensors for SHARDED_STATE_DICT,
/// too, with a warning, and refuse LOCAL_STATE_DICT.
enum class StateDictType {
  FULL_STATE_DICT,     // whole plain tensors, copied; gathered, so every rank makes the call
  LOCAL_STATE_DICT,    // this rank's shards, as plain tensors: of use to the same ranks on the same
                       // mesh alone
  SHARDED_STATE_DICT,  // DTensors that share the parameters' memory
};

/// `offload_to_cpu`: tensors on the CPU. `rank0_only`: ranks that are not the first of the mesh
/// take part and get an empty dict.
struct FullStateDictConfig {
  bool offload_to_cpu = false;
  bool rank0_only = false;
  bool operator==(const FullStateDictConfig&) const = default;
};
struct LocalStateDictConfig {
  bool offload_to_cpu = false;
  bool operator==(const LocalStateDictConfig&) const = default;
};
struct ShardedStateDictConfig {
  bool offload_to_cpu = false;
  bool operator==(const ShardedStateDictConfig&) const = default;
};
struct FullOptimStateDictConfig {
  bool offload_to_cpu = true;
  bool rank0_only = false;
  bool operator==(const FullOptimStateDictConfig&) const = default;
};
struct LocalOptimStateDictConfig {
  bool offload_to_cpu = false;
  bool operator==(const LocalOptimStateDictConfig&) const = default;
};
struct ShardedOptimStateDictConfig {
  bool offload_to_cpu = true;
  bool operator==(const ShardedOptimStateDictConfig&) const = default;
};

/// In the order of StateDictType: each type has a class of its own.
using StateDictConfig =
    std::variant<FullStateDictConfig, LocalStateDictConfig, ShardedStateDictConfig>;
using OptimStateDictConfig =
    std::variant<FullOptimStateDictConfig, LocalOptimStateDictConfig, ShardedOptimStateDictConfig>;

struct StateDictSettings {
  StateDictType type = StateDictType::FULL_STATE_DICT;
  StateDictConfig state_dict_config = FullStateDictConfig{};
  OptimStateDictConfig optim_state_dict_config = FullOptimStateDictConfig{};
  bool operator==(const StateDictSettings&) const = default;
};

/// For all units in the module, which itself need not be one. No config: the type's, with its
/// defaults; one of another type is an error, and nothing is set. Returns the old settings, those
/// of the first unit if units had different ones.
StateDictSettings set_state_dict_type(
    nn::ModuleRef module, StateDictType type,
    const std::optional<StateDictConfig>& state_dict_config = std::nullopt,
    const std::optional<OptimStateDictConfig>& optim_state_dict_config = std::nullopt);
/// To set what was returned.
StateDictSettings set_state_dict_type(nn::ModuleRef module, const StateDictSettings& settings);

/// The settings that all units in the module share; an error if they do not.
StateDictSettings get_state_dict_type(nn::ModuleRef module);

/// Sets them while it lives; then each unit has its own again.
class StateDictTypeScope {
 public:
  StateDictTypeScope(
      nn::ModuleRef module, StateDictType type,
      const std::optional<StateDictConfig>& state_dict_config = std::nullopt,
      const std::optional<OptimStateDictConfig>& optim_state_dict_config = std::nullopt);
  ~StateDictTypeScope();
  StateDictTypeScope(const StateDictTypeScope&) = delete;
  StateDictTypeScope& operator=(const StateDictTypeScope&) = delete;

 private:
  struct Old;
  std::vector<Old> old_;
};

}  // namespace tessera
