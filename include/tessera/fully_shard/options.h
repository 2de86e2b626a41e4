#pragma once

#include <tessera/comm.h>
#include <tessera/dtensor/placement.h>
#include <tessera/fully_shard/policy.h>
#include <tessera/mesh.h>

#include <concepts>
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
  /// Modules whose parameters and buffers stay as they are: what comes in is cast to their dtype,
  /// what goes out back to the one it came in. They need to be hookable. None: batch norms;
  /// module_classes<>() leaves out nothing.
  ModulePredicate module_classes_to_ignore = {};
  /// Of what forward returns; not of units that a policy makes of the module's parts.
  std::optional<at::ScalarType> output_dtype = std::nullopt;
  /// Modules in evaluation mode, module->eval(), compute in full precision. None: as the variable
  /// FSDP_USE_FULL_PREC_IN_EVAL says, 1 or 0; unset: false.
  std::optional<bool> full_precision_in_eval = std::nullopt;
};

/// `offload_params`: shards, their gradients and so the optimizer's state are in the CPU's memory;
/// parameters come to the device when their unit computes. On the CPU it changes nothing.
struct CPUOffload {
  bool offload_params = false;
};

/// What becomes of gathered parameters between forward and backward: true, they are freed; false,
/// they are kept; a number of at least 2, each group of so many neighbouring ranks keeps one copy
/// of them, a part each, from which backward gathers without the other ranks. A 1, which could mean
/// either, 0 and negative numbers are refused. Where ranks share memory nothing is gathered, and a
/// number is as good as true.
class ReshardAfterForward {
 public:
  ReshardAfterForward(bool frees) : frees_(frees) {}  // NOLINT(google-explicit-constructor)
  template <std::integral N>
    requires(!std::same_as<N, bool>)
  ReshardAfterForward(N ranks)  // NOLINT(google-explicit-constructor)
      : ranks_(static_cast<int64_t>(ranks)) {}

  bool frees() const { return frees_; }
  /// None if it is not a number.
  std::optional<int64_t> ranks() const { return ranks_; }

 private:
  bool frees_ = true;
  std::optional<int64_t> ranks_;
};

/// FSDP's options, then those that FSDP2 brought, then ours. Which go together, and which are
/// refused, is a table in docs/guide/fully_shard.md.
struct FullyShardOptions {
  // As in FSDP.

  /// Whose ranks share the parameters. None: `mesh`'s, or the default group.
  Group process_group = {};
  /// Which submodules become units of their own. None: the module is one unit.
  WrapPolicy policy = {};
  ShardingStrategy strategy = ShardingStrategy::FULL_SHARD;
  MixedPrecision mixed_precision = {};
  CPUOffload cpu_offload = {};
  /// Left alone with all that is below them.
  std::vector<nn::ModuleRef> ignored_modules = {};
  /// An integer or a c10::Device: parameters are moved there first. An IValue, as in replicate.
  c10::IValue device_id = {};
  /// Gives values to parameters and buffers that were built without memory (on the meta device). It
  /// is called with each module that has such, once all have memory, and torch::nn's own modules
  /// what they start with; it must write what others have.
  std::function<void(torch::nn::Module&)> param_init_fn = {};
  /// Start with the values of the group's first rank.
  bool sync_module_states = false;
  /// Gather the next unit while one computes. None: where the backend works in the background.
  std::optional<bool> forward_prefetch = std::nullopt;
  /// Parameters that are left alone.
  std::vector<at::Tensor> ignored_states = {};

  // As in FSDP2, which also has `mixed_precision` and `cpu_offload`, called policies there.

  /// 1-D: parameters are sharded along it. 2-D: copies along the first dimension, shards along the
  /// second.
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// Free what was gathered when forward ends; or a number of ranks, a divisor of the shards'.
  /// Given, it counts, whatever the strategy says. None: as that says, but not for the outermost
  /// unit, nor for the one that ran last in the first forward: their backward comes next. Without
  /// one they stay whole until a forward ends without gradients.
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;
  /// Along which dimension a parameter is sharded, given that parameter; none: Shard(0). Units with
  /// another dimension are gathered even where ranks share memory.
  std::function<std::optional<Placement>(const at::Tensor& parameter)> shard_placement_fn = {};
  // Ours.

  /// Where gradients add up over several batches without being averaged (NoSync): false, as whole
  /// gradients on every rank, without communication, at the cost of the unsharded model's gradients
  /// in memory; true, as shards, by one reduce-scatter per batch.
  bool accumulate_sharded = false;
};

}  // namespace tessera
