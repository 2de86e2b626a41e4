#pragma once

#include <tessera/dtensor.h>
#include <tessera/parallel/context.h>
#include <tessera/parallel/plan.h>
#include <tessera/parallel/prepare.h>
#include <tessera/parallel/styles.h>

/// Tensor parallel training: the parameters of a module are distributed over a mesh, and what goes
/// in and out of it is placed to match.
namespace tessera {

struct ParallelizeOptions {
  /// Index along the mesh whose values count for all; none: each rank cuts its own, without
  /// communication.
  std::optional<int> src_data_rank = 0;
};

namespace detail {
/// current_mesh(), or an error that names the function.
DeviceMesh require_current_mesh(const char* function);
void parallelize(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                 const ParallelizeOptions& options);
}  // namespace detail

/// Applies a style to `module`, or each entry of a plan to the submodules that its pattern names:
///   parallelize_module(net, mesh["tp"], {{"blocks.*.up",   ColwiseParallel()},
///                                        {"blocks.*.down", RowwiseParallel()}});
/// Every rank of the 1-D mesh calls it with the same plan. Parameters become DTensors in place:
/// members, optimizers and parameters() go on holding them, and their names do not change; the next
/// step of an optimizer that has made states for the plain ones throws. A module takes one style
/// that distributes it, and any number of PrepareModule…. What was given is returned. Without a
/// plan: a warning, and nothing happens. An entry that throws leaves what those before it have
/// done.
template <nn::ModuleLike M>
M parallelize_module(M&& module, const DeviceMesh& mesh, const ParallelPlan& plan = {},
                     const ParallelizeOptions& options = {}) {
  detail::parallelize(nn::as_module(module), mesh, plan, options);
  return std::forward<M>(module);
}

/// The same over the mesh in force (MeshScope); an error where there is none.
template <nn::ModuleLike M>
M parallelize_module(M&& module, const ParallelPlan& plan, const ParallelizeOptions& options = {}) {
  detail::parallelize(nn::as_module(module), detail::require_current_mesh("parallelize_module"),
                      plan, options);
  return std::forward<M>(module);
}

/// While it lives, cross_entropy and log_softmax of this thread work on logits that are sharded
/// over the classes, without gathering them: maxima, sums and the loss travel, a number or three
/// per row. Backward belongs inside too (outside it gathers). Logits come from a ColwiseParallel
/// head with `use_local_output = false`; targets may be plain tensors, equal on all ranks.
class loss_parallel {
 public:
  loss_parallel();
  ~loss_parallel();
  loss_parallel(const loss_parallel&) = delete;
  loss_parallel& operator=(const loss_parallel&) = delete;

 private:
  c10::DebugInfoGuard scope_;
};

/// Rows of a weight or bias that holds `packed` matrices one under the other, from the order in
/// which the module was written to that in which ColwiseParallel({.packed = …}) keeps them for so
/// many ranks, and back. Whole tensors, without communication.
at::Tensor pack_rows(const at::Tensor& whole, int64_t packed, int64_t ranks);
at::Tensor unpack_rows(const at::Tensor& whole, int64_t packed, int64_t ranks);

}  // namespace tessera
