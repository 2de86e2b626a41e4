#pragma once

#include "dtensor/rules.h"

/// Looking up by index in a dimension of which each rank has a chunk: it finds its own, puts 0
/// where others have them, and the sum over the ranks is pending.
namespace tessera::dtensor {

/// Throws if an index points nowhere: no rank would find it, and none would say so.
void check_range(const c10::OperatorHandle& op, const at::Tensor& indices, int64_t size);

/// Whether 0 is neutral for the sum that is pending then.
bool can_look_up(const Operand& table);

/// Of gather (self, dim, index) and index_select (self, dim, index): the operators themselves where
/// that dimension is whole.
void run_gather(const c10::OperatorHandle& op, const Choice& choice,
                const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack);
void run_index_select(const c10::OperatorHandle& op, const Choice& choice,
                      const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack);

/// Of index_add, index_copy, index_fill and index_reduce (self, dim, index, …): where that
/// dimension of self is sharded, each rank writes what falls into its chunk.
void run_index_write(const c10::OperatorHandle& op, const Choice& choice,
                     const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack);

/// The same of scatter and its kind (self, dim, index, …), index_put (self, indices, values, …) and
/// put (self, index, source, accumulate): see Note [room for others].
void run_scatter(const c10::OperatorHandle& op, const Choice& choice,
                 const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack);
void run_index_put(const c10::OperatorHandle& op, const Choice& choice,
                   const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack);
void run_put(const c10::OperatorHandle& op, const Choice& choice,
             const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack);

}  // namespace tessera::dtensor
