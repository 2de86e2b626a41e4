#pragma once

#include <tessera/fully_shard.h>
#include <tessera/replicate.h>

#include "compose/drawn_tree.h"

#include <optional>
#include <string>
#include <vector>

/// Which of checkpoint, replicate, fully_shard and tensor parallelism are applied to the modules of
/// a tree: a legal nesting, drawn by seed.
namespace tessera::testing {

/// What the ranks of a nesting are to each other.
struct Layout {
  std::string name;                               // "flat", "hybrid" or "tensor parallel"
  std::optional<DeviceMesh> data = std::nullopt;  // of replicate and fully_shard; none: all ranks
  std::optional<DeviceMesh> hybrid = std::nullopt;
  std::optional<DeviceMesh> tensor = std::nullopt;

  Group data_group() const { return data ? data->group() : default_group(); }
};

enum class Function { None, Replicate, FullyShard, Joined /* of the unit of its outer module */ };
enum class Policy { None, OfLayers, OfMlps, Custom };

/// What is applied to one module.
struct Application {
  Function function = Function::None;
  bool is_checkpointed = false;
  bool checkpoints_first = false;
  bool is_tensor_parallel = false;
  bool joins_parts = false;  // all its parts are one unit
  bool has_two_dimensions = false;
  Policy policy = Policy::None;
  ShardingStrategy strategy = ShardingStrategy::FULL_SHARD;
  std::optional<bool> reshard_after_forward = std::nullopt;
  std::optional<bool> forward_prefetch = std::nullopt;
  std::optional<double> bucket_cap_mb = std::nullopt;
  std::optional<bool> overlap = std::nullopt;
  bool gradient_as_bucket_view = false;
  bool finds_unused = false;
  bool accumulate_sharded = false;
  MixedPrecision precision = {};
  std::vector<Application> parts;
};

Application draw_nesting(Random& random, const Shape& root, const Layout& layout);
/// Makes all of a nesting compute in bfloat16: its root is fully sharded, and nothing replicated,
/// which computes as it stands. Not for tensor parallelism, whose sums are rounded otherwise.
void draw_precision(Random& random, const Layout& layout, Application& root);
/// On one line: every module with what is applied to it.
std::string describe(const Shape& shape, const Application& application);
/// Tensor parallelism first, then innermost first; every rank calls it.
void apply(const Application& application, const Part& part, const Layout& layout);

}  // namespace tessera::testing
