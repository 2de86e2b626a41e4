#pragma once

#include <tessera/compile/graph.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

/// What is known of operators, for every pass to ask.
namespace tessera::compiler {

/// The node that runs one kernel of ours; its body says what the kernel computes.
constexpr const char* kFused = "tessera::fused";
/// Does nothing: what comes behind it may wait until the next call; see Note [next iteration].
constexpr const char* kNextIteration = "tessera::next_iteration";

/// The operator a node names, from the dispatcher; null for "tessera::fused" and unknown names.
std::optional<c10::OperatorHandle> find_operator(const std::string& name);
/// "aten::add.Tensor" of a schema.
std::string name_of(const c10::FunctionSchema& schema);

/// Whether the schema writes this argument (and the node consumes it).
bool writes(const c10::FunctionSchema& schema, size_t argument);
/// The same of a call; knows of operators that write more than their schemas say, such as the
/// running statistics of aten::native_batch_norm in training. False for an absent tensor.
bool writes(const Node& node, size_t argument);
bool consumes(const Node& node);  // any argument
/// A constant as the operator takes it: a number where it wants a tensor is a tensor, which takes
/// part in type promotion as a number does; none where it needs one is an undefined tensor.
c10::IValue constant_as_declared(const c10::IValue& constant, const c10::Argument& declared);
/// Which returns of the schema become results of a node: tensors and lists of tensors, without
/// consumed arguments handed back.
std::vector<size_t> own_returns(const c10::FunctionSchema& schema);

/// Whether the result may share memory with an argument that is not written: a view. A wait is one.
bool is_view(const Node& node);
/// Whether no two of the results of a view overlap: split, unbind ...
bool is_disjoint_view(const Node& node);
/// Whether the result is the argument itself, place by place: alias, detach, wait.
bool is_same_place_view(const Node& node);
/// The arguments that a view may share memory with.
std::vector<size_t> viewed_arguments(const Node& node);
/// Elementwise: every element of the result comes from the elements at its place.
bool is_pointwise(const Node& node);
/// Draws from a generator: never removed as a double of another, never folded.
bool is_random(const Node& node);
/// Talks to other ranks: launches and waits.
bool is_collective(const Node& node);
/// A launch: the node's result must be waited for. "_c10d_functional::all_reduce" ...
bool is_launch(const Node& node);
/// The name of the group a launch sends in; empty for other nodes.
std::string group_of(const Node& node);
bool is_wait(const Node& node);
bool is_wait(const std::string& op);
bool is_gather(const Node& node);
/// A launch, of one tensor or several, in place or not.
bool is_all_reduce(const Node& node);
/// A launch, of one tensor or several, that leaves each rank its part of the combined one.
bool is_reduce_scatter(const Node& node);
/// The elements of an argument, elsewhere or as another dtype.
bool is_copy(const Node& node);
bool is_clone(const Node& node);
/// Whether it begins at the first element of what it shows, if it is a view: with the same sizes
/// and strides it is the same.
bool views_from_start(const Node& node);
/// Of its tensors it reads sizes alone.
bool reads_sizes_alone(const Node& node);
/// Of its first argument it keeps sizes alone, and takes the elements of the second.
bool takes_sizes_of_first(const Node& node);
/// A launch whose results are alike on all ranks.
bool gives_all_ranks_the_same(const Node& node);
bool is_division(const Node& node);
bool is_concatenation(const Node& node);
/// Elements of its argument, some of them several times.
bool is_broadcast(const Node& node);
/// A constant, of sizes that are given.
bool is_constant_of_sizes(const Node& node);
/// Lists of tensors, place by place: aten::_foreach_add.List, aten::_fused_adamw_ ...
bool is_over_lists(const Node& node);
/// An optimizer's step of all parameters: lists of parameters, gradients, state.
bool is_fused_update(const Node& node);
/// Of two matrices.
bool is_matrix_product(const Node& node);
/// Of the same, and of one to which rows of a bias are added as they are: which argument is the
/// left matrix; the right one is the next.
std::optional<size_t> factors_of(const Node& node);
/// The same, of batches of them and with an addend, too; the last tensor is the right matrix.
bool multiplies_matrices(const Node& node);
/// A norm, softmax, sum or the like: reads its arguments a few times, and writes no more.
bool computes_rows(const Node& node);
/// Each element of a result depends on those at its place, also where it is not tagged so.
bool is_elementwise(const Node& node);
enum class Arithmetic { Scales, Adds, Subtracts };
/// What it does to its first argument with its second; none: something else, or in place.
std::optional<Arithmetic> arithmetic_of(const Node& node);
/// Whether what it keeps for backward depends on grad mode, below autograd, too.
bool asks_grad_mode(const Node& node);
/// Whether it writes every element of an argument that it writes, and reads none.
bool overwrites(const c10::FunctionSchema& schema, size_t argument);
/// Whether it only tells the allocator who uses memory: no part of what is computed.
bool is_for_allocator(const c10::FunctionSchema& schema);
/// Whether it gives a tensor other memory.
bool exchanges_memory(const c10::FunctionSchema& schema);
/// Whether the numbers that it returns besides tensors are sizes of what it is given.
bool gives_sizes(const c10::FunctionSchema& schema);
/// Indexing: by integers, as many elements as there are of them; by masks, any number.
bool takes_indices(const c10::FunctionSchema& schema);
/// Compares two tensors on the host.
bool compares_tensors(const c10::FunctionSchema& schema);
/// Whether a launch reads its arguments until its result has been waited for.
bool reads_until_waited(const Node& node);
/// A launch whose tensors may have other sizes on other ranks.
bool sends_unevenly(const Node& node);
/// Whether it must stay although nobody needs its results: draws, messages, checks.
bool must_stay(const Node& node);
/// Does something besides computing results: consumes an argument, or must stay.
bool has_effect(const Node& node);
/// The form of the operator that writes its first argument, "aten::add_.Tensor"; "" if it has none
/// with the same further arguments.
std::string in_place_form(const std::string& op);

}  // namespace tessera::compiler
