#pragma once

#include <c10/util/Exception.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace tessera {

/// Makes the object whose lifetime is a scope, e.g. `[] { return std::make_shared<MyGuard>(); }`.
/// Empty: no scope.
using ScopeFactory = std::function<std::shared_ptr<void>()>;

/// What the forward and every recomputation of one checkpointed call run inside.
using CheckpointContexts = std::pair<ScopeFactory, ScopeFactory>;

/// In the order of Python's torch.distributed._composable.checkpoint.
struct CheckpointOptions {
  /// Random numbers and masks drawn by the recomputation are those of the forward; afterwards the
  /// generators are where they were. Of the CPU and of the CUDA devices of the arguments.
  bool preserve_rng_state = true;
  /// Called once per checkpointed call; see selective_contexts.
  std::function<CheckpointContexts()> context_fn = {};
  /// "default": shapes, dtypes and devices of what the recomputation saves must be the forward's.
  /// "none": only their number.
  std::string determinism_check = "default";
  /// A CheckpointError lists the operators of both runs. Slow.
  bool debug = false;
  /// Ends a recomputation once it has what backward needs.
  bool early_stop = true;
  /// Only false is implemented.
  bool use_reentrant = false;
};

/// The recomputation of a checkpointed call did not repeat its forward. The text starts with
/// "checkpoint:".
class CheckpointError : public c10::Error {
 public:
  using c10::Error::Error;
  CheckpointError(const CheckpointError&) = default;
  ~CheckpointError() override;
};

}  // namespace tessera
