#pragma once

#include "dtensor/rules.h"

#include <functional>
#include <vector>

/// Rules of operators that move elements: shards pass from a dimension of the arguments to one of
/// the results, and what is pending stays pending.
namespace tessera::dtensor {

/// Shards of dimension `from` of every tensor argument give shards of `to` of every result.
struct DimMapping {
  int64_t from;
  int64_t to;
  bool even = false;  // only if all shards are equally large
};
using DimMappings = std::vector<DimMapping>;

/// Which Partial arguments give results that are Partial of the same kind.
enum class Pending {
  None,
  Sums,  // linear operators: sum and avg
  All,   // elements are moved, or the same constant is put next to them on every rank: 0
};

/// Every dimension to itself, but for these.
DimMappings all_but(int64_t ndim, const std::vector<int64_t>& excluded);

Rows mapping_rows(const Call& call, const DimMappings& mappings, Pending pending);

using FindDimMappings = std::function<DimMappings(const Call& call)>;
/// Works on empty and on strided shards.
Rule mapping_rule(FindDimMappings find, Pending pending);

/// Different placements of an operand over the mesh; Replicate if it is a plain tensor.
std::vector<Placement> placements_of(const Operand& operand);
/// Its kinds of Partial that pass.
std::vector<ReduceOp::RedOpType> pending_ops(const Operand& operand, Pending pending);

/// What this rank holds of a tensor of these sizes; all outside of the mesh, where nothing runs.
Sizes own_sizes(const Choice& choice, const Sizes& sizes, const Placements& placements);
Chunk own_chunk(const Choice& choice, int64_t size, int64_t tensor_dim,
                const Placements& placements);
bool is_sharded(const Placements& placements, int64_t tensor_dim);

/// Puts the local sizes in place of an argument that holds the global sizes of the result.
Adapt with_own_sizes(const char* argument, std::function<Sizes(const Call&)> result_sizes);

/// Leaves a result on the stack in place of the arguments.
void give(torch::jit::Stack& stack, at::Tensor result);

/// For operators that need the whole of their arguments.
Rule no_rows();

}  // namespace tessera::dtensor

/// Rules of operators that work along some dimensions and treat the others index by index.
namespace tessera::dtensor {

/// Dimensions of the first tensor argument that an operator treats index by index.
using FreeDims = std::function<std::vector<int64_t>(const Call& call)>;
/// All but the last `trailing`: batch and channels, say.
FreeDims leading_dims(int64_t trailing);
/// All but those that an argument names, which may be one or a list.
FreeDims dims_beside(const char* argument);

using FindShapes = std::function<std::vector<Sizes>(const Call& call)>;
/// Results as large as these tensor arguments.
FindShapes sizes_of(std::vector<size_t> inputs);

/// All tensors cut alike along each free dimension; none where an argument is broadcast along it.
Rows alike_rows(const Call& call, const std::vector<int64_t>& dims);
Rule alike_rule(FreeDims dims, FindShapes shapes = {});

/// Where a shard of dimension `dim` of a result of these sizes lies in an operand that is broadcast
/// to it: the same elements, or all of it if it has but one along that dimension.
Placement broadcast_shard(const Operand& operand, int64_t dim, const Sizes& result);
/// Whether the operand can be broadcast to these sizes.
bool broadcasts_to(const Operand& operand, const Sizes& sizes);

/// Whether the result is wanted, by the argument output_mask; what is not has no value to place.
bool is_asked(const Call& call, size_t output);
/// Results of a backward: the input's gradient placed as `input`, the parameters' as `parameters`.
void place_gradients(const Call& call, std::vector<Placement>& row, const Placement& input,
                     const Placement& parameters);
/// The argument keepdim; false if there is none.
bool keeps_dims(const Call& call);
/// The argument reduction of a loss, an at::Reduction.
int64_t reduction_of(const Call& call);
/// Ranks of the mesh: what is divisible by it is so by every part of the mesh.
int64_t mesh_ranks(const Call& call);
bool is_on_cpu(const Call& call);

/// For kernels that want contiguous tensors, which chunks of them need not be.
void make_contiguous(const c10::FunctionSchema& schema, torch::jit::Stack& local);

/// Multiplies by `factor`; 0 if the factor is, whatever the tensor holds.
void scale_(const at::Tensor& tensor, double factor);

}  // namespace tessera::dtensor
