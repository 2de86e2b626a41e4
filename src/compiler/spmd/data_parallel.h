#pragma once

#include <tessera/compile/graph.h>
#include <tessera/mesh.h>

#include <optional>
#include <string>

namespace tessera::compiler {

struct StyleChoice {
  bool shards = false;
  std::string why;  // a line for explain()
};

/// What the Default style of DataParallel is for a step. Note [which style]: sharded parameters
/// cost a second message per parameter and are gathered in every step, so Replicate is taken as
/// long as a rank's parameters, gradients and optimizer state keep within the budget; and above it
/// if FullyShard would need no less memory. `budget` none: half of the memory that is free for
/// a rank on the device, the least of all ranks. Collective.
StyleChoice choose_style(const Graph& graph, const DeviceMesh& mesh, std::optional<int64_t> budget);

}  // namespace tessera::compiler
