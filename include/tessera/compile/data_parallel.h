#pragma once

#include <tessera/compile/parallel_mode.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Who keeps what.
enum class DataParallelStyle {
  Default,     // Replicate, unless what a rank then keeps is more than the memory budget
  Replicate,   // every rank has all parameters
  FullyShard,  // each has its rows of parameters and optimizer state, and gathers the others'
               // when it computes
};

/// What a data parallel step computes.
enum class DataParallelSemantics {
  /// Every rank the step on its part of the batch, with averaged gradients: as DDP. Where the step
  /// mixes samples (batch norm, in-batch negatives, a masked mean), each rank mixes its own.
  PerRank,
  /// All ranks together what one device computes on the whole batch, which is the ranks' parts one
  /// after another. Operators that mix samples communicate.
  OneDevice,
};

/// What happens where an operator mixes samples of different ranks.
enum class OnMix {
  Gather,  // OneDevice: activations are gathered, and explain() tells. PerRank: a warning
  Error,
};

struct DataParallelOptions {
  /// The dimension of the function's tensors along which each rank passes its part.
  int64_t input_batch_dim = 0;
  /// The same for each tensor among the arguments, in order; none: it has no batch, and is alike on
  /// all ranks. Empty: input_batch_dim for all.
  std::vector<std::optional<int64_t>> input_batch_dims = {};
  DataParallelSemantics semantics = DataParallelSemantics::PerRank;
  OnMix on_mix = OnMix::Gather;
  /// OneDevice: batches may change their sizes on some ranks alone, as the last of an epoch does.
  /// To know that, ranks exchange a number at each call, and wait. False: that is an error on all.
  bool uneven_batches = false;
  /// The step returns DTensors: outputs sharded along their batch, losses that are Partial. What
  /// has no placement (see explain()) stays a plain tensor. Otherwise PerRank returns this rank's
  /// values; OneDevice this rank's samples, and all of what has none.
  bool returns_dtensors = false;
  /// For the Default style: bytes of parameters, gradients and optimizer state that a rank may
  /// keep. None: half of what the device has free, on the rank that has least.
  std::optional<int64_t> memory_budget = std::nullopt;
  /// Run after ours.
  std::vector<Pass> custom_passes = {};
};

/// The step on every rank's part of the batch, over all ranks.
class DataParallel final : public ParallelMode {
 public:
  explicit DataParallel(DataParallelStyle style = DataParallelStyle::Replicate,
                        DataParallelOptions options = {});
  /// By the name of the style: "default", "replicate" or "fully_shard".
  explicit DataParallel(const std::string& style, DataParallelOptions options = {});

  DeviceMesh mesh(c10::DeviceType device) const override;
  void prepare(ParallelCall& call) const override;
  void partition(Graph& graph, const DeviceMesh& mesh) const override;
  void partition(Graph& graph, ParallelCall& call) const override;
  bool takes_uneven_batches() const override;
  std::vector<Pass> passes() const override { return options_.custom_passes; }

 private:
  std::optional<int64_t> batch_dim_of(size_t argument) const;
  void place_arguments(Graph& graph) const;
  bool shards(const Graph& graph, ParallelCall& call) const;
  void analyse(Graph& graph, ParallelCall& call) const;

  DataParallelStyle style_;
  DataParallelOptions options_;
};

}  // namespace tessera
