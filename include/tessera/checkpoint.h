#pragma once

/// Activation checkpointing: memory for time. What a checkpointed call computes inside is not kept
/// for backward but computed again when backward gets there.
///
/// For the whole process: the first use of anything here but options puts an autograd engine in
/// front of the one that is there, libtorch's or Python's, which still runs all backwards. The
/// first selective checkpoint takes the dispatch key Fake; if it is taken already, that is an
/// error.
#include <tessera/checkpoint/call.h>
#include <tessera/checkpoint/options.h>
#include <tessera/checkpoint/saved_tensor_hooks.h>
#include <tessera/checkpoint/selective.h>

namespace tessera {

namespace detail::checkpoint {
void apply_checkpoint(torch::nn::Module& module, CheckpointOptions options);
}

/// Checkpoints every call of `module` (made by TESSERA_MODULE or from tessera::nn): see
/// checkpoint_call. Returns what it was given. Names of parameters stay as they are. The
/// recomputation runs the module's other hooks too, and leaves running statistics (BatchNorm's) as
/// the forward made them. Once per module; composes with replicate,
/// fully_shard and parallelize_module, inside and around other checkpointed modules.
template <nn::ModuleLike M>
M checkpoint(M&& module, CheckpointOptions options = {}) {
  detail::checkpoint::apply_checkpoint(nn::as_module(module), std::move(options));
  return std::forward<M>(module);
}

struct CheckpointState {
  bool enabled = true;  // false: calls are plain
};

/// Of a module that checkpoint was applied to.
CheckpointState& checkpoint_state(nn::ModuleRef module);

}  // namespace tessera
