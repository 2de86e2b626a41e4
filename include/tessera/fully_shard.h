#pragma once

#include <tessera/dtensor.h>
#include <tessera/fully_shard/options.h>
#include <tessera/fully_shard/state.h>
#include <tessera/fully_shard/state_dict_type.h>
#include <tessera/fully_shard/summon.h>
#include <tessera/nn/gradient_sync.h>
#include <tessera/nn/meta_init.h>

#include <concepts>

/// Sharded data parallel training: every rank keeps a part of each parameter, gradient and
/// optimizer state, and its own part of the batch. Units are gathered when they compute. For the
/// whole process: on a CPU glibc is told to keep freed memory, unless
/// InitOptions::keep_freed_memory is false; the first unit takes a dispatch key, see dtensor.h.
namespace tessera {

namespace detail {
void fully_shard_modules(const std::vector<nn::ModuleRef>& modules, FullyShardOptions options);
}

/// Shards the parameters of `module` that no unit inside it has taken, as one unit. Every rank
/// calls it, in the same order; a collective. Apply it to the inner modules first, then to the
/// whole, before making the optimizer.
///
/// Outside of forward and backward the parameters are DTensors, Shard(0) over the ranks; inside,
/// plain whole tensors (or those of a tensor parallel mesh); always the same tensor objects, so
/// members, names and optimizers stay. Gradients are averaged and come as DTensors. Values are this
/// rank's: seed all ranks alike, or set sync_module_states. A parameter must not be written while
/// it is whole. What was given is returned.
template <nn::ModuleLike M>
M fully_shard(M&& module, FullyShardOptions options = {}) {
  detail::fully_shard_modules({nn::ModuleRef(module)}, std::move(options));
  return std::forward<M>(module);
}
/// Several modules as one unit: gathered when the first of them is called, freed after the last.
inline void fully_shard(const std::vector<nn::ModuleRef>& modules, FullyShardOptions options = {}) {
  detail::fully_shard_modules(modules, std::move(options));
}

/// Null if fully_shard was never applied to this module.
std::shared_ptr<FullyShardState> fully_shard_state(nn::ModuleRef module);

/// By hand: makes the parameters of the module's own unit whole, to be read; and shards again. A
/// collective. Forward takes what is whole already; after it the unit is sharded as ever.
void unshard(nn::ModuleRef module);
void reshard(nn::ModuleRef module);

// Settings of one unit, or, with `recurse`, of all units in the module; read at the next use.
void set_reshard_after_forward(nn::ModuleRef module, bool reshard, bool recurse = true);
void set_reshard_after_forward(nn::ModuleRef, std::integral auto, bool = true) = delete;
/// false: parameters stay whole in memory after backward, for the next forward, until a step
/// changes them: operators on them or on what to_local() gave, on every rank, not a pointer.
void set_reshard_after_backward(nn::ModuleRef module, bool reshard, bool recurse = true);
/// Hybrid: false reduces gradients within each sharding group alone and keeps them, apart from the
/// parameters' gradients, until a backward for which it is true averages all of them over the
/// copies.
void set_requires_all_reduce(nn::ModuleRef module, bool required, bool recurse = true);
/// Gradients are summed and divided by this instead of by the number of ranks.
void set_gradient_divide_factor(nn::ModuleRef module, double factor);
/// Units whose gather starts when this one's forward, or backward, starts, instead of the one that
/// came next last time. All of them are gathered at once: a list of several takes their memory.
void set_modules_to_forward_prefetch(nn::ModuleRef module,
                                     const std::vector<nn::ModuleRef>& modules);
void set_modules_to_backward_prefetch(nn::ModuleRef module,
                                      const std::vector<nn::ModuleRef>& modules);

}  // namespace tessera
