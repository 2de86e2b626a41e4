#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// How graphs are compiled, besides the options of each call. Of this thread; see ConfigPatch.
struct CompileConfig {
  /// Passes over averages of gradients, in this order, by our names or upstream's:
  /// "fuse_ddp_with_concat_op" makes buckets of one tensor, "fuse_ddp_with_coalesced_op" of a list,
  /// "bucket_all_reduces_by_size" of one tensor and of the large ones as they are;
  /// "schedule_comm_wait" ("schedule_waits") puts waits off. "comm_fusion_with_concat" sends early,
  /// then as one tensor; "split_fused_optimizer", behind "remove_copy_from_optimizer", updates the
  /// parameters of each bucket by themselves; "iter_move_grads_and_optimizers", behind both, lets
  /// calls leave the update of the last bucket to the next one, see LastTrainStep.
  std::vector<std::string> fuse_ddp_passes = {"bucket_all_reduces_by_size", "schedule_waits"};
  /// Whether collectives move up to what they need.
  bool reorder_for_locality = true;
  /// How replicate and the compiler work together:
  /// "python_reducer": averages are operators of the program.
  /// "python_reducer_without_compiled_forward": the same, but compile(module) runs forward eagerly.
  /// "ddp_optimizer": replicate's engine averages, and a compiled backward is cut where a bucket is
  ///   complete, into a program each, so that the bucket travels while the next one runs. A
  ///   compiled forward is one program: its backward has the operators' own nodes in any case.
  ///   A compiled step, which is one program, averages by operators.
  /// "no_optimization": replicate's engine averages; forwards are compiled, a backward or step in
  ///   which it averages runs eagerly.
  std::string optimize_ddp = "python_reducer";
  /// Where buckets end; none: at the bucket_cap_mb of the replicated module, which is 1 MiB for the
  /// first and 25 MiB for the others if it has none.
  std::optional<int64_t> bucket_bytes = std::nullopt;
  /// On GPUs, of steps whose collectives are NCCL's in one group: whether they become part of the
  /// CUDA graph that is replayed. NCCL then wants all ranks to replay the same graph at the same
  /// call, so they call the step with tensors of the same sizes at the same time, and exchange
  /// memory of parameters at the same time; otherwise it is an error on all, some calls later.
  bool capture_collectives = false;
  /// On GPUs: whether dropout is ATen's operator, which draws what eager draws. Otherwise kernels
  /// draw the numbers that they need from a seed of ATen's generator: the same seed gives the same
  /// numbers in every run, but not eager's. In a parallel mode, in compile(module) and in
  /// CompiledBackward it is ATen's in any case.
  bool fallback_random = false;

  bool operator==(const CompileConfig&) const = default;
};

const CompileConfig& compile_config();

/// What differs from the configuration around it, while it lives:
///
///   ConfigPatch patch({.fuse_ddp_passes = {{"fuse_ddp_with_coalesced_op",
///   "schedule_comm_wait"}}});
class ConfigPatch {
 public:
  struct Changes {
    std::optional<std::vector<std::string>> fuse_ddp_passes = std::nullopt;
    std::optional<bool> reorder_for_locality = std::nullopt;
    std::optional<std::string> optimize_ddp = std::nullopt;
    std::optional<int64_t> bucket_bytes = std::nullopt;
    std::optional<bool> capture_collectives = std::nullopt;
    std::optional<bool> fallback_random = std::nullopt;
  };
  explicit ConfigPatch(const Changes& changes);
  ~ConfigPatch();
  ConfigPatch(const ConfigPatch&) = delete;
  ConfigPatch& operator=(const ConfigPatch&) = delete;

 private:
  CompileConfig before_;
};

}  // namespace tessera
