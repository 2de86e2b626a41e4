#pragma once

#include <tessera/comm.h>
#include <tessera/mesh.h>
#include <tessera/nn.h>
#include <tessera/replicate/comm_hooks.h>
#include <tessera/replicate/join.h>
#include <tessera/replicate/state.h>

/// Data parallel training: every rank has the whole model and its own part of the batch; gradients
/// are averaged during backward.
namespace tessera {

struct ReplicateOptions {
  /// Left alone with all that is below them: neither broadcast nor averaged.
  std::vector<nn::ModuleRef> ignored_modules = {};
  /// An integer or a c10::Device: tensors among the arguments of forward are moved there. A CPU
  /// device moves nothing.
  c10::IValue device_id = {};
  /// Rank 0's buffers go to all before every synchronising forward.
  bool broadcast_buffers = false;
  /// At the start: check that all ranks have the same parameters, and take rank 0's values.
  bool init_sync = true;
  Group group = {};  // none: `mesh`'s, or the default group
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// Size at which a bucket of gradients is closed. None: 1 MiB for the first, 25 MiB for the rest.
  std::optional<double> bucket_cap_mb = std::nullopt;
  /// For models in which a forward does not use every parameter, or not the same on every rank.
  bool find_unused_parameters = false;
  /// Gradients live in the buckets: no copy back, but they change with the next backward.
  bool gradient_as_bucket_view = false;
  /// Every iteration uses the same parameters equally often: what the first one shows is relied
  /// upon.
  bool static_graph = false;
  /// Whether buckets travel while backward goes on, or backward waits for each. None: the former on
  /// a GPU, over a network, and where the machine has cores to spare for it.
  std::optional<bool> overlap = std::nullopt;
};

/// Averages the gradients of `module` over the ranks of a group during backward. Every rank calls
/// it once, with the same parameters in the same order. A hookable module joins the others at its
/// first forward, a plain one in this call, which is a collective then. Names of parameters do not
/// change; what was given is returned. Throws if `module` is already replicated or fully sharded.
/// Post-accumulate-grad hooks that were registered before that see this rank's gradient and may
/// change it; later ones must leave it alone, as it may be on its way to the other ranks. Averages
/// are in place once backward returns.
template <nn::ModuleLike M>
M replicate(M&& module, ReplicateOptions options = {}) {
  detail::replicate_module(nn::as_module(module), std::move(options));
  return std::forward<M>(module);
}

/// Whether the next backward averages gradients (true, the default) or only adds them up on every
/// rank. Read at the next forward; a plain module reads it at the next backward. Applies to all
/// replicated modules in `module`.
void set_requires_gradient_sync(torch::nn::Module& module, bool requires_sync);
template <nn::ModuleLike M>
void set_requires_gradient_sync(M&& module, bool requires_sync) {
  set_requires_gradient_sync(nn::as_module(module), requires_sync);
}

/// No averaging while it lives: for all but the last of the batches whose gradients add up.
class NoSync {
 public:
  template <nn::ModuleLike M>
  explicit NoSync(M&& module) : NoSync(nn::as_module(module)) {}
  explicit NoSync(torch::nn::Module& module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<ReplicateState>, bool>> before_;
};

/// Replaces the averaging of one bucket. Once per replicated module, before its first backward.
void register_comm_hook(torch::nn::Module& module, CommHook hook);
template <nn::ModuleLike M>
void register_comm_hook(M&& module, CommHook hook) {
  register_comm_hook(nn::as_module(module), std::move(hook));
}

}  // namespace tessera
