#pragma once

#include <tessera/comm.h>
#include <tessera/fully_shard/policy.h>
#include <tessera/mesh.h>

#include <functional>
#include <optional>
#include <vector>

namespace tessera {

/// What ranks keep between uses of a unit.
enum class ShardingStrategy {
  FULL_SHARD,          // shards alone: parameters are gathered before forward and before backward
  SHARD_GRAD_OP,       // what was gathered for forward, until backward is through
  NO_SHARD,            // whole parameters; gradients are averaged, as replicate does
  HYBRID_SHARD,        // FULL_SHARD along the mesh's second dimension, copies along its first
  HYBRID_SHARD_ZERO2,  // SHARD_GRAD_OP likewise
};

/// In which dtypes a unit computes and communicates. Shards, gradients and optimizer state keep the
/// parameters' own. Only floating-point tensors are cast.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = std::nullopt;   // of parameters inside forward
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;  // of gradients on their way; none:
                                                              // as they come out of backward
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;  // of buffers, cast once
  bool keep_low_precision_grads = false;  // shards of gradients stay in the dtype of reduction
  bool cast_forward_inputs = false;       // tensors among the arguments become param_dtype
  bool cast_root_forward_inputs = true;   // the same for the outermost unit
  std::optional<at::ScalarType> output_dtype = std::nullopt;  // of what forward returns
};

struct CPUOffload {
  bool offload_params = false;
};

struct FullyShardOptions {
  /// Whose ranks share the parameters. None: `mesh`'s, or the default group.
  Group process_group = {};
  /// Which submodules become units of their own. None: the module is one unit.
  WrapPolicy policy = {};
  ShardingStrategy strategy = ShardingStrategy::FULL_SHARD;
  MixedPrecision mixed_precision = {};
  CPUOffload cpu_offload = {};
  /// Left alone with all that is below them.
  std::vector<nn::ModuleRef> ignored_modules = {};
  /// An integer or a c10::Device: parameters are moved there first.
  c10::IValue device_id = {};
  /// Gives values to the parameters of a module that was built without memory (on the meta device);
  /// none: what torch::nn's own modules start with.
  std::function<void(torch::nn::Module&)> param_init_fn = {};
  /// Start with the values of the group's first rank.
  bool sync_module_states = false;
  /// Gather the next unit while one computes. None: where the backend works in the background.
  std::optional<bool> forward_prefetch = std::nullopt;
  /// Parameters that are left alone.
  std::vector<at::Tensor> ignored_states = {};

  /// 1-D: parameters are sharded along it. 2-D: copies along the first dimension, shards along the
  /// second.
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// Free what was gathered when forward ends. None: as the strategy says, but not for the
  /// outermost unit, whose backward comes next.
  std::optional<bool> reshard_after_forward = std::nullopt;
  /// Where gradients add up over several batches without being averaged (NoSync): false, as whole
  /// gradients on every rank, without communication, at the cost of the unsharded model's gradients
  /// in memory; true, as shards, by one reduce-scatter per batch.
  bool accumulate_sharded = false;
};

}  // namespace tessera
