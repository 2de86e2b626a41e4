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

/// What a recomputation has in common with its forward, or is a CheckpointError.
enum class DeterminismCheck {
  Default,  // shapes, dtypes and devices of what is saved
  None,     // their number alone
};

/// A DeterminismCheck, or its name in Python: "default" or "none". Another one is a ValueError.
class DeterminismCheckOption {
 public:
  DeterminismCheckOption(DeterminismCheck check) : check_(check) {}  // NOLINT: all convert
  DeterminismCheckOption(const std::string& name);                   // NOLINT
  DeterminismCheckOption(const char* name) : DeterminismCheckOption(std::string(name)) {}  // NOLINT
  operator DeterminismCheck() const { return check_; }                                     // NOLINT

 private:
  DeterminismCheck check_;
};

/// In the order of Python's torch.distributed._composable.checkpoint.
struct CheckpointOptions {
  /// Random numbers and masks drawn by the recomputation are those of the forward; afterwards the
  /// generators are where they were. Of the CPU and of the CUDA devices of the arguments.
  bool preserve_rng_state = true;
  /// Called once per checkpointed call; see selective_contexts.
  std::function<CheckpointContexts()> context_fn = {};
  DeterminismCheckOption determinism_check = DeterminismCheck::Default;
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
