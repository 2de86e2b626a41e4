#pragma once

#include <tessera/checkpoint/options.h>

#include <ATen/core/operator_name.h>

#include <vector>

/// Checkpointing that keeps the results of some operators, usually the expensive ones.
namespace tessera {

/// Must and Prefer do the same here; a compiler may overrule a preference.
enum class CheckpointPolicy {
  MustSave,  // keep the results, take them instead of running the operator again
  PreferSave,
  MustRecompute,
  PreferRecompute,
};

/// Which operators' results are kept. Operators are those that compute: a Linear is an aten::addmm
/// or aten::mm. Results that are views, and operators that write into their arguments, are never
/// kept.
class SelectivePolicy {
 public:
  using Decide = std::function<CheckpointPolicy(const c10::OperatorName& name)>;

  /// Asked for every operator of the forward, on its thread.
  SelectivePolicy(Decide decide);  // NOLINT(google-explicit-constructor)
  /// Keeps the results of these, recomputes the rest. "aten::mm" means all its overloads,
  /// "aten::add.Tensor" one. An operator that does not exist is a ValueError.
  explicit SelectivePolicy(const std::vector<std::string>& names);

  CheckpointPolicy operator()(const c10::OperatorName& name) const { return decide_(name); }

 private:
  Decide decide_;
};

/// Keeps the results of matrix products, convolutions and attention.
SelectivePolicy save_matmul_results();

/// For CheckpointOptions::context_fn.
///   tessera::checkpoint(block, {.context_fn =
///                                   tessera::selective_contexts(tessera::save_matmul_results())});
/// A kept result that is changed in place between the call and backward is an error.
std::function<CheckpointContexts()> selective_contexts(SelectivePolicy policy);

}  // namespace tessera
