#pragma once

#include <tessera/dtensor/placement.h>
#include <tessera/mesh.h>

#include <torch/csrc/api/include/torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>

/// How one module is made tensor parallel.
namespace tessera {

/// A module that a plan names.
struct StyleTarget {
  torch::nn::Module& module;
  DeviceMesh mesh;                   // 1-D
  std::string path;                  // from the module that was parallelized; "": itself
  std::optional<int> src_data_rank;  // as given to parallelize_module
};

/// A style of one's own distributes parameters by distribute_tensor_ and sees to inputs and outputs
/// by forward hooks.
class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  /// Called on every rank of the mesh, once per module that the plan names.
  virtual void apply(const StyleTarget& target) const = 0;
};

struct ColwiseParallelOptions {
  Placement input_layouts = Replicate();  // of plain inputs; distributed ones know theirs
  Placement output_layouts = Shard(-1);
  bool use_local_output = true;  // a plain tensor, this rank's part, comes out
  /// The output features are this many attention heads, of which each rank gets equally many,
  /// whole; 0: any cut will do. With `packed`: heads of each of the packed parts.
  int64_t heads = 0;
  /// The output features are this many equal parts, such as query, key and value, and each rank
  /// gets its share of every one. Rows of weight and bias are put in the order of ranks for that:
  /// full_tensor() and state dicts hold them so; see pack_rows. load_state_dict takes distributed
  /// values only for them. A model whose features are ordered by head first, [head, 3, size], needs
  /// none of this.
  int64_t packed = 1;
};

/// A Linear whose output features are sharded (its weight is Shard(0)), or an Embedding whose
/// features are (Shard(1)).
class ColwiseParallel final : public ParallelStyle {
 public:
  explicit ColwiseParallel(ColwiseParallelOptions options = {});
  void apply(const StyleTarget& target) const override;

 private:
  ColwiseParallelOptions options_;
};

struct RowwiseParallelOptions {
  /// None: Shard(-1) for a Linear; Replicate() for an Embedding, whose inputs are indices.
  std::optional<Placement> input_layouts = std::nullopt;
  Placement output_layouts = Replicate();  // Shard: reduced and scattered
  bool use_local_output = true;
  int64_t heads = 0;  // that the input features are, as for ColwiseParallel
};

/// A Linear whose input features are sharded (its weight is Shard(1), its bias Replicate), or an
/// Embedding whose rows are (Shard(0)). After ColwiseParallel with default layouts: one all-reduce
/// for the two.
class RowwiseParallel final : public ParallelStyle {
 public:
  explicit RowwiseParallel(RowwiseParallelOptions options = {});
  void apply(const StyleTarget& target) const override;

 private:
  RowwiseParallelOptions options_;
};

struct SequenceParallelOptions {
  int64_t sequence_dim = 1;
  bool use_local_output = false;
};

/// LayerNorm, Dropout or a norm of one's own on inputs sharded along the sequence. Its parameters
/// are replicated without communication: ranks must hold the same. Of plain inputs the ranks
/// compare sizes.
class SequenceParallel final : public ParallelStyle {
 public:
  explicit SequenceParallel(SequenceParallelOptions options = {});
  void apply(const StyleTarget& target) const override;

 private:
  SequenceParallelOptions options_;
};

}  // namespace tessera
