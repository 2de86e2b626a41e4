#pragma once

#include <tessera/comm.h>
#include <tessera/mesh.h>
#include <tessera/nn/gradient_sync.h>
#include <tessera/replicate/comm_hooks.h>
#include <tessera/replicate/join.h>
#include <tessera/replicate/state.h>
#include <tessera/replicate/sync_batchnorm.h>

/// Data parallel training: every rank has the whole model and its own part of the batch; gradients
/// are averaged during backward. For the whole process: with parameters on a CPU glibc is told to
/// keep freed memory, unless InitOptions::keep_freed_memory is false.
namespace tessera {

/// In which dtypes a replicated module computes and averages. Parameters, gradients and optimizer
/// state keep the parameters' own; only floating-point tensors are cast.
struct DDPMixedPrecision {
  /// Of parameters and inputs inside of forward and backward. Between them a parameter shows the
  /// cast copy, so that each forward has one backward, and nobody writes parameters in between.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Of gradients on their way; none: param_dtype.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;  // of buffers, cast once
};

struct ReplicateOptions {
  /// Left alone with all that is below them: neither broadcast nor averaged.
  std::vector<nn::ModuleRef> ignored_modules = {};
  /// An integer or a c10::Device: tensors among the arguments of forward are moved there. A CPU
  /// device moves nothing. An IValue takes both, as Python's does, and what is neither is an error
  /// when replicate is called.
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
  /// Averaged as one message, sent when all of them are there and so is the gradient of
  /// `param_to_hook_all_reduce`; the others travel in buckets as ever. Names as in
  /// named_parameters().
  std::vector<std::string> delay_all_reduce_named_params = {};
  std::string param_to_hook_all_reduce = {};
  std::optional<DDPMixedPrecision> mixed_precision = std::nullopt;
};

/// Averages the gradients of `module` over the ranks of a group during backward. Every rank calls
/// it once, with the same parameters in the same order. A hookable module joins the others at its
/// first forward, a plain one in this call, which is a collective then. Names of parameters do not
/// change; what was given is returned. Throws if `module` is already replicated or fully sharded.
/// Post-accumulate-grad hooks that were registered before that see this rank's gradient and may
/// change it; later ones must leave it alone, as it may be on its way to the other ranks. Averages
/// are in place once backward returns. Calls of parts of a hookable module do not count: a gradient
/// that comes without a forward of the module itself is an error, unless nothing is to be averaged
/// (NoSync).
///
/// Ranks make the same steps. One that skips a backward after its forward, or an optimizer step, is
/// told at the next average, on all ranks (over shm and gloo). Not seen: a batch that a rank leaves
/// out altogether, forward included, or whose forward threw; forwards inside of NoSync or in
/// eval(); steps of torch::optim::SGD, which hides its writes; anything in a compiled step. Any
/// other write to parameters counts as a step.
template <nn::ModuleLike M>
M replicate(M&& module, ReplicateOptions options = {}) {
  detail::replicate_module(nn::as_module(module), std::move(options));
  return std::forward<M>(module);
}

/// Replaces the averaging of one bucket. Once per replicated module, before its first backward.
void register_comm_hook(torch::nn::Module& module, CommHook hook);
template <nn::ModuleLike M>
void register_comm_hook(M&& module, CommHook hook) {
  register_comm_hook(nn::as_module(module), std::move(hook));
}

}  // namespace tessera

#include <tessera/replicate/ddp.h>
