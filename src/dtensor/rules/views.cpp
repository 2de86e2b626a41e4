// Views, by which dimension of the result holds which dimension of the argument. Sizes given as
// arguments are global and are replaced by local ones.
#include "dtensor/rules/common_rules.h"

#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <numeric>

namespace tessera::dtensor {
namespace {

// Note [shards through a view]
// A view joins and splits runs of dimensions. A run that is one dimension before and after keeps
// its shards, whatever they are. In any other run the elements of a rank must be one interval
// before and after: the outermost dimension is sharded on both sides, and all shards are equally
// large. If they are not, the chunk rule cuts 5 x 2 rows into 3 x 2 and 2 x 2, but 10 into 5 and 5.
// Dimensions of size 1 belong to no run.

/// Dimensions that are longer than 1.
std::vector<int64_t> long_dims(const Sizes& sizes) {
  std::vector<int64_t> dims;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != 1) dims.push_back(static_cast<int64_t>(dim));
  }
  return dims;
}

DimMappings view_mappings(const Sizes& before, const Sizes& after) {
  DimMappings mappings;
  if (c10::multiply_integers(before) == 0) return mappings;
  const auto from = long_dims(before);
  const auto to = long_dims(after);
  for (size_t i = 0, j = 0; i < from.size() && j < to.size();) {
    const size_t first_from = i;
    const size_t first_to = j;
    int64_t length = before[from[i++]];
    int64_t other = after[to[j++]];
    while (length != other) {
      if (length < other)
        length *= before[from[i++]];
      else
        other *= after[to[j++]];
    }
    const bool is_kept = i == first_from + 1 && j == first_to + 1;
    mappings.push_back({from[first_from], to[first_to], !is_kept});
  }
  return mappings;
}

Sizes viewed_sizes(const Call& call) {
  return at::infer_size(call.argument("size").toIntVector(), call.operand(0).numel());
}

/// Local memory may lie otherwise than the strides of the whole say: then a copy has to do.
void run_view(const c10::OperatorHandle& op, const Choice& /*choice*/,
              const std::vector<Sizes>& /*input_sizes*/, torch::jit::Stack& stack) {
  const auto self = stack[0].toTensor();
  const auto sizes = stack[1].toIntVector();
  const bool copies = op.schema().name() == "aten::view_copy";
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  give(stack, strides && !copies ? self.view(sizes)
                                 : self.clone(at::MemoryFormat::Contiguous).view(sizes));
}

Rule view_rule() {
  auto rule = mapping_rule(
      [](const Call& call) { return view_mappings(call.operand(0).sizes, viewed_sizes(call)); },
      Pending::All);
  rule.adapt = with_own_sizes("size", viewed_sizes);
  rule.run = run_view;
  return rule;
}
const Registration kView({"aten::view", "aten::_unsafe_view", "aten::_reshape_alias",
                          "aten::view_copy"},
                         view_rule());

/// Elements of another type: the last dimension changes its length with their width.
DimMappings retyped_mappings(const Call& call) {
  const auto& self = call.operand(0);
  const auto dtype = call.argument("dtype").toScalarType();
  const bool keeps_width = c10::elementSize(dtype) == c10::elementSize(self.dtype);
  return all_but(self.ndim(),
                 keeps_width ? std::vector<int64_t>{} : std::vector<int64_t>{self.ndim() - 1});
}

constexpr int64_t kWidest = 16;  // bytes of an element, at most

/// Needs neighbours next to each other, and the first of them at its own boundary.
void run_on_dense(const c10::OperatorHandle& op, const Choice& /*choice*/,
                  const std::vector<Sizes>& /*input_sizes*/, torch::jit::Stack& stack) {
  const auto& self = stack[0].toTensor();
  if (!self.is_contiguous() || self.storage_offset() % kWidest != 0)
    stack[0] = self.clone(at::MemoryFormat::Contiguous);
  op.callBoxed(stack);
}

Rule on_dense(FindDimMappings find, Pending pending) {
  auto rule = mapping_rule(std::move(find), pending);
  rule.run = run_on_dense;
  return rule;
}
const Registration kViewDtype({"aten::view.dtype", "aten::view_copy.dtype"},
                              on_dense(retyped_mappings, Pending::None));
const Registration kViewAsComplex(
    {"aten::view_as_complex", "aten::view_as_complex_copy"},
    on_dense([](const Call& call) { return all_but(call.operand(0).ndim() - 1, {}); },
             Pending::Sums));

/// `order[to]`: the dimension that comes to place `to`.
DimMappings ordered_mappings(const std::vector<int64_t>& order) {
  DimMappings mappings;
  for (size_t to = 0; to < order.size(); ++to)
    mappings.push_back({order[to], static_cast<int64_t>(to)});
  return mappings;
}

DimMappings swapped_mappings(int64_t ndim, int64_t one, int64_t other) {
  std::vector<int64_t> order(ndim);
  std::iota(order.begin(), order.end(), 0);
  if (ndim > 0) std::swap(order[one], order[other]);
  return ordered_mappings(order);
}

const Registration kPermute({"aten::permute", "aten::permute_copy"},
                            mapping_rule(
                                [](const Call& call) {
                                  const int64_t ndim = call.operand(0).ndim();
                                  return ndim == 0 ? DimMappings()
                                                   : ordered_mappings(call.dims("dims", ndim));
                                },
                                Pending::All));
const Registration kTranspose({"aten::transpose.int", "aten::transpose_copy.int"},
                              mapping_rule(
                                  [](const Call& call) {
                                    const int64_t ndim = call.operand(0).ndim();
                                    return swapped_mappings(ndim, call.dim("dim0", ndim),
                                                            call.dim("dim1", ndim));
                                  },
                                  Pending::All));
const Registration kT({"aten::t", "aten::t_copy"},
                      mapping_rule(
                          [](const Call& call) {
                            const int64_t ndim = call.operand(0).ndim();
                            return swapped_mappings(ndim, 0, std::max<int64_t>(ndim - 1, 0));
                          },
                          Pending::All));
const Registration kUnsqueeze({"aten::unsqueeze", "aten::unsqueeze_copy"},
                              mapping_rule(
                                  [](const Call& call) {
                                    const int64_t ndim = call.operand(0).ndim();
                                    const int64_t place = call.dim("dim", ndim + 1);
                                    DimMappings mappings;
                                    for (int64_t dim = 0; dim < ndim; ++dim)
                                      mappings.push_back({dim, dim < place ? dim : dim + 1});
                                    return mappings;
                                  },
                                  Pending::All));

/// Dimensions that go: of those asked for the ones that are 1 long.
std::vector<int64_t> squeezed_dims(const Sizes& sizes, std::vector<int64_t> asked) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  std::vector<int64_t> squeezed;
  for (auto& dim : asked) dim = at::maybe_wrap_dim(dim, ndim);
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (sizes[dim] == 1 && std::find(asked.begin(), asked.end(), dim) != asked.end())
      squeezed.push_back(dim);
  }
  return squeezed;
}

std::vector<int64_t> asked_dims(const c10::FunctionSchema& schema, const c10::IValue* argument,
                                int64_t ndim) {
  if (schema.arguments().size() > 1 && schema.arguments()[1].name() == "dim")
    return argument->isInt() ? std::vector<int64_t>{argument->toInt()} : argument->toIntVector();
  std::vector<int64_t> all(ndim);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

DimMappings squeeze_mappings(const Call& call) {
  const auto& sizes = call.operand(0).sizes;
  const auto& arguments = call.arguments();
  const auto gone =
      squeezed_dims(sizes, asked_dims(call.schema(), arguments.size() > 1 ? &arguments[1] : nullptr,
                                      call.operand(0).ndim()));
  DimMappings mappings;
  for (const auto& kept : all_but(call.operand(0).ndim(), gone))
    mappings.push_back({kept.from, static_cast<int64_t>(mappings.size())});
  return mappings;
}

/// A part may be 1 long where the whole is not.
void run_squeeze(const c10::OperatorHandle& op, const Choice& /*choice*/,
                 const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto asked = asked_dims(op.schema(), stack.size() > 1 ? &stack[1] : nullptr,
                                static_cast<int64_t>(input_sizes[0].size()));
  auto result = stack[0].toTensor().squeeze(squeezed_dims(input_sizes[0], asked));
  give(stack, op.schema().name() == "aten::squeeze" ? result : result.clone());
}

Rule squeeze_rule() {
  auto rule = mapping_rule(squeeze_mappings, Pending::All);
  rule.run = run_squeeze;
  return rule;
}
const Registration kSqueeze({"aten::squeeze", "aten::squeeze_copy"}, squeeze_rule());

Sizes expanded_sizes(const Call& call) {
  auto sizes = call.argument("size").toIntVector();
  const auto& self = call.operand(0);
  const auto added = sizes.size() - self.sizes.size();
  for (size_t dim = added; dim < sizes.size(); ++dim) {
    if (sizes[dim] == -1) sizes[dim] = self.sizes[dim - added];
  }
  return sizes;
}

Rule expand_rule() {
  auto rule = mapping_rule(
      [](const Call& call) {
        const auto& self = call.operand(0);
        const auto sizes = expanded_sizes(call);
        const auto added = static_cast<int64_t>(sizes.size()) - self.ndim();
        DimMappings mappings;
        for (int64_t dim = 0; dim < self.ndim(); ++dim) {
          if (self.sizes[dim] == sizes[dim + added]) mappings.push_back({dim, dim + added});
        }
        return mappings;
      },
      Pending::All);
  rule.adapt = with_own_sizes("size", expanded_sizes);
  return rule;
}
const Registration kExpand({"aten::expand", "aten::expand_copy"}, expand_rule());

const Registration kRepeat({"aten::repeat"},
                           mapping_rule(
                               [](const Call& call) {
                                 const auto repeats = call.argument("repeats").toIntVector();
                                 const int64_t ndim = call.operand(0).ndim();
                                 const auto added = static_cast<int64_t>(repeats.size()) - ndim;
                                 DimMappings mappings;
                                 for (int64_t dim = 0; dim < ndim; ++dim) {
                                   if (repeats[dim + added] == 1)
                                     mappings.push_back({dim, dim + added});
                                 }
                                 return mappings;
                               },
                               Pending::All));

const Registration kUnfold({"aten::unfold", "aten::unfold_copy"},
                           mapping_rule(
                               [](const Call& call) {
                                 const int64_t ndim = call.operand(0).ndim();
                                 return ndim == 0 ? DimMappings()
                                                  : all_but(ndim, {call.dim("dimension", ndim)});
                               },
                               Pending::All));

/// What else a linear copy is.
const Registration kAliases(
    {"aten::lift", "aten::alias_copy", "aten::detach_copy", "aten::view_as_real",
     "aten::view_as_real_copy"},
    mapping_rule([](const Call& call) { return all_but(call.operand(0).ndim(), {}); },
                 Pending::Sums));

/// Strides are steps in memory, and ranks have memory only for their parts. A whole tensor that is
/// contiguous is as good as its memory, if nothing is said about where that begins: views do not
/// know their place in their base.
Rows as_strided_rows(const Call& call, int64_t /*ranks*/) {
  const auto& self = call.operand(0);
  const bool is_contiguous =
      self.strides == dense_strides_like(self.sizes, Sizes(self.sizes.size()));
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_contiguous && call.argument("storage_offset").isNone(), call.schema().name(),
      ": expected a contiguous distributed tensor and no storage_offset, got strides ",
      self.strides, " and storage_offset ", call.argument("storage_offset"),
      "; use slices, or work on full_tensor()");
  return {};
}

Rule as_strided_rule() {
  Rule rule{as_strided_rows};
  rule.run = [](const c10::OperatorHandle& op, const Choice&, const std::vector<Sizes>&,
                torch::jit::Stack& stack) {
    auto self = stack[0].toTensor().contiguous();
    stack[0] = self.storage_offset() == 0 ? self : self.clone();
    op.callBoxed(stack);
  };
  return rule;
}
const Registration kAsStrided({"aten::as_strided", "aten::as_strided_copy",
                               "aten::as_strided_scatter"},
                              as_strided_rule());

/// The shape of a distributed tensor is part of what everybody who holds it relies on, and its
/// memory is the ranks'.
[[noreturn]] Rows refuse(const Call& call, int64_t /*ranks*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, call.schema().name(),
      ": a distributed tensor can't be given another shape or memory in place; use the form that ",
      "returns a new tensor, or work on to_local()");
}
const Registration kRefused({"aten::squeeze_", "aten::unsqueeze_", "aten::t_", "aten::transpose_",
                             "aten::as_strided_", "aten::swapaxes_", "aten::swapdims_",
                             "aten::resize_", "aten::resize_as_", "aten::set_",
                             "aten::_resize_output_"},
                            Rule{refuse});

}  // namespace
}  // namespace tessera::dtensor
