#pragma once

#include <tessera/fully_shard/options.h>

#include <string>

namespace tessera::sharded {

/// A parameter as it was when fully_shard found it.
struct FoundParameter {
  at::Tensor tensor;
  std::string name;          // relative to the module
  bool keeps_dtype = false;  // mixed precision leaves its module alone
  int64_t shard_dim = 0;     // along which it is cut
};

struct SummonSettings {
  bool with_grads;
  bool shows;  // false: this rank only takes part in gathering
};

/// What a unit keeps while copies are shown.
struct Summoned {
  SummonSettings settings;
  std::vector<at::Tensor> gradients;  // the parameters' own meanwhile
};

/// What stays in memory of gathered parameters that nobody reads.
enum class Keep {
  Nothing,
  Part,  // what neighbours need to make them whole again, if the unit has neighbours
  All,
};

struct UnitSettings {
  std::string name;  // of the module, for messages
  DeviceMesh mesh;   // 1-D, or 2-D: copies, shards
  Group group;  // over whose ranks parameters are split; null: along the last dimension of the mesh
  Group neighbours;  // of Keep::Part; null: none
  bool is_split;     // NO_SHARD: false
  int64_t number;    // equal on all ranks
  MixedPrecision precision;
  bool accumulate_sharded;
  bool offloads;  // shards and gradients lie in the CPU's memory
};

}  // namespace tessera::sharded
