#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

using Sizes = std::vector<int64_t>;
using Function = std::function<at::Tensor(const at::Tensor&)>;

Case one(const char* name, Sizes sizes, Function function) {
  return {name, {Input(std::move(sizes), Input::Kind::Normal)}, [function](const Tensors& x) {
            return Tensors{function(x[0])};
          }};
}

Case several(const char* name, Sizes sizes, std::function<Tensors(const at::Tensor&)> function) {
  return {name, {Input(std::move(sizes), Input::Kind::Normal)}, [function](const Tensors& x) {
            return function(x[0]);
          }};
}

Case view(const char* name, Sizes before, Sizes after) {
  return one(name, std::move(before), [after](const at::Tensor& x) { return x.view(after); });
}

// Uneven and empty shards wherever dimensions are joined or split.
const Cases kViews(
    "views",
    {
        view("join", {4, 6}, {24}),
        view("join_uneven", {5, 4}, {20}),
        view("join_uneven_that_joins_evenly", {3, 2, 4}, {6, 4}),
        view("join_first", {4, 3, 2}, {12, 2}),
        view("join_last", {5, 3, 2}, {5, 6}),
        view("split", {24}, {4, 6}),
        view("split_into_fewer_than_ranks", {8}, {2, 4}),
        view("split_uneven", {6, 2}, {3, 2, 2}),
        view("split_last", {5, 6}, {5, 3, 2}),
        view("rearrange", {4, 6}, {8, 3}),
        view("rearrange_crosswise", {6, 4}, {4, 6}),
        view("infer", {4, 6}, {4, -1, 2}),
        view("drop_ones", {5, 1, 4, 1}, {5, 4}),
        view("add_ones", {5, 4}, {1, 5, 1, 4}),
        view("of_one_element", {1, 1}, {1}),
        view("of_nothing", {0, 4}, {2, 0, 2}),
        one("flatten", {3, 4, 2}, [](const at::Tensor& x) { return x.flatten(1); }),
        one("unflatten", {5, 6}, [](const at::Tensor& x) { return x.unflatten(1, {2, 3}); }),
        one("reshape_of_transposed", {4, 6},
            [](const at::Tensor& x) { return x.t().reshape({8, 3}); }),
        one("view_of_sum", {4, 6}, [](const at::Tensor& x) { return (x + x).view({2, 2, 6}); }),
        one("unsafe_view", {4, 6}, [](const at::Tensor& x) { return at::_unsafe_view(x, {24}); }),
        one("view_copy", {4, 6}, [](const at::Tensor& x) { return at::view_copy(x, {4, 2, 3}); }),
        one("permute", {5, 3, 2}, [](const at::Tensor& x) { return x.permute({2, 0, 1}); }),
        one("permute_copy", {5, 3},
            [](const at::Tensor& x) { return at::permute_copy(x, {1, 0}); }),
        one("transpose", {5, 3, 2}, [](const at::Tensor& x) { return x.transpose(0, -1); }),
        one("transpose_copy", {5, 3},
            [](const at::Tensor& x) { return at::transpose_copy(x, 0, 1); }),
        one("t", {5, 3}, [](const at::Tensor& x) { return x.t(); }),
        one("t_of_vector", {5}, [](const at::Tensor& x) { return x.t(); }),
        one("t_copy", {5, 3}, [](const at::Tensor& x) { return at::t_copy(x); }),
        one("movedim", {5, 3, 2}, [](const at::Tensor& x) { return x.movedim(0, 2); }),
        one("expand", {5, 1}, [](const at::Tensor& x) { return x.expand({5, 3}); }),
        one("expand_new", {5, 1}, [](const at::Tensor& x) { return x.expand({2, -1, 3}); }),
        one("expand_copy", {5, 1}, [](const at::Tensor& x) { return at::expand_copy(x, {5, 3}); }),
        one("repeat", {5, 3}, [](const at::Tensor& x) { return x.repeat({1, 2}); }),
        one("repeat_new", {5, 3}, [](const at::Tensor& x) { return x.repeat({2, 1, 1}); }),
        one("tile", {5, 3}, [](const at::Tensor& x) { return x.tile({2}); }),
        one("unsqueeze", {5, 3}, [](const at::Tensor& x) { return x.unsqueeze(1); }),
        one("unsqueeze_copy", {5, 3},
            [](const at::Tensor& x) { return at::unsqueeze_copy(x, -1); }),
        one("squeeze", {4, 1, 3, 1}, [](const at::Tensor& x) { return x.squeeze(); }),
        one("squeeze_of_parts_of_one", {4, 3}, [](const at::Tensor& x) { return x.squeeze(); }),
        one("squeeze_dim", {4, 1, 3}, [](const at::Tensor& x) { return x.squeeze(1); }),
        one("squeeze_dim_that_is_longer", {4, 3}, [](const at::Tensor& x) { return x.squeeze(0); }),
        one("squeeze_dims", {4, 1, 1, 3}, [](const at::Tensor& x) { return x.squeeze({0, 2}); }),
        one("squeeze_copy", {4, 1, 3}, [](const at::Tensor& x) { return at::squeeze_copy(x); }),
        one("unfold", {5, 6}, [](const at::Tensor& x) { return x.unfold(1, 3, 2); }),
        one("unfold_copy", {5, 6}, [](const at::Tensor& x) { return at::unfold_copy(x, 1, 2, 2); }),
        one("diagonal", {5, 3, 4}, [](const at::Tensor& x) { return x.diagonal(1, 0, 2); }),
        one("diagonal_copy", {5, 3}, [](const at::Tensor& x) { return at::diagonal_copy(x); }),
        one("diag_embed", {5, 3}, [](const at::Tensor& x) { return x.diag_embed(1, 0, 2); }),
        one("view_as_complex", {5, 3, 2},
            [](const at::Tensor& x) { return at::view_as_real(at::view_as_complex(x)); }),
        one("view_as_complex_of_slice", {5, 3, 4},
            [](const at::Tensor& x) {
              return at::view_as_real(at::view_as_complex(x.narrow(2, 1, 2).contiguous()));
            }),
        {"view_dtype",
         {Input({5, 4})},
         [](const Tensors& x) { return Tensors{x[0].view(at::kInt), x[0].view(at::kDouble)}; },
         /*backward=*/false},
    });

const Cases kSlices(
    "slices",
    {
        one("slice", {5, 4}, [](const at::Tensor& x) { return x.slice(0, 1, 4); }),
        one("slice_steps", {5, 4}, [](const at::Tensor& x) { return x.slice(0, 1, 5, 2); }),
        one("slice_from_end", {5, 4}, [](const at::Tensor& x) { return x.slice(1, -3, -1); }),
        one("slice_of_all", {5, 4}, [](const at::Tensor& x) { return x.slice(0); }),
        one("slice_of_more_than_all", {5, 4},
            [](const at::Tensor& x) { return x.slice(0, -9, 100); }),
        one("slice_of_nothing", {5, 4}, [](const at::Tensor& x) { return x.slice(0, 3, 3); }),
        one("slice_copy", {5, 4}, [](const at::Tensor& x) { return at::slice_copy(x, 0, 1, 4); }),
        one("select", {5, 4, 2}, [](const at::Tensor& x) { return x.select(1, -1); }),
        one("select_copy", {5, 4}, [](const at::Tensor& x) { return at::select_copy(x, 0, 2); }),
        one("narrow", {5, 4}, [](const at::Tensor& x) { return x.narrow(1, 1, 2); }),
        several("split", {5, 4}, [](const at::Tensor& x) { return x.split(2, 0); }),
        several("split_with_sizes", {5, 4},
                [](const at::Tensor& x) { return x.split_with_sizes({1, 3}, 1); }),
        several("split_copy", {5, 4}, [](const at::Tensor& x) { return at::split_copy(x, 2, 1); }),
        several("unsafe_split", {5, 4},
                [](const at::Tensor& x) { return at::unsafe_split(x, 3, 0); }),
        several("chunk", {5, 4}, [](const at::Tensor& x) { return x.chunk(3, 0); }),
        several("tensor_split", {5, 4}, [](const at::Tensor& x) { return x.tensor_split(2, 1); }),
        several("unbind", {3, 5, 2}, [](const at::Tensor& x) { return x.unbind(1); }),
        several("unbind_copy", {3, 4}, [](const at::Tensor& x) { return at::unbind_copy(x, 0); }),
        {"slice_scatter",
         {{5, 4}, {5, 2}},
         [](const Tensors& x) { return Tensors{at::slice_scatter(x[0], x[1], 1, 1, 3)}; },
         /*backward=*/false},
        {"slice_scatter_of_all",
         {{5, 4}, {5, 4}},
         [](const Tensors& x) { return Tensors{at::slice_scatter(x[0], x[1], 0)}; },
         /*backward=*/false},
        {"select_scatter",
         {{5, 4, 2}, {5, 2}},
         [](const Tensors& x) { return Tensors{at::select_scatter(x[0], x[1], 1, 2)}; },
         /*backward=*/false},
        {"diagonal_scatter",
         {{5, 3, 4}, {3, 4}},
         [](const Tensors& x) { return Tensors{at::diagonal_scatter(x[0], x[1], 0, 0, 2)}; },
         /*backward=*/false},
    });

const Cases kJoins(
    "joins",
    {
        {"cat", {{5, 4}, {5, 2}}, [](const Tensors& x) { return Tensors{at::cat(x, 1)}; }},
        {"cat_rows", {{5, 4}, {1, 4}}, [](const Tensors& x) { return Tensors{at::cat(x, 0)}; }},
        {"cat_with_nothing",
         {Input(Sizes{0}, Input::Kind::Normal), {5, 4}},
         [](const Tensors& x) { return Tensors{at::cat(x, -1)}; }},
        {"cat_dtypes",
         {{5, 4}, {5, 2}},
         [](const Tensors& x) { return Tensors{at::cat({x[0], x[1].to(at::kDouble)}, 1)}; }},
        {"stack", {{5, 4}, {5, 4}}, [](const Tensors& x) { return Tensors{at::stack(x, 1)}; }},
        {"stack_last",
         {{5, 4}, {5, 4}},
         [](const Tensors& x) { return Tensors{at::stack(x, -1)}; }},
        {"hstack", {{5, 4}, {5, 2}}, [](const Tensors& x) { return Tensors{at::hstack(x)}; }},
        {"block_diag",
         {{5, 4}, {1, 3}},
         [](const Tensors& x) { return Tensors{at::block_diag(x)}; }},
        one("roll", {5, 4}, [](const at::Tensor& x) { return x.roll({1}, {1}); }),
        one("roll_flat", {5, 4}, [](const at::Tensor& x) { return x.roll({3}); }),
        one("flip", {5, 4}, [](const at::Tensor& x) { return x.flip({0}); }),
        one("rot90", {5, 4, 2}, [](const at::Tensor& x) { return x.rot90(1, {0, 1}); }),
        one("rot90_twice", {5, 4}, [](const at::Tensor& x) { return x.rot90(2, {0, 1}); }),
        one("constant_pad", {5, 4},
            [](const at::Tensor& x) { return at::constant_pad_nd(x, {1, 2}); }),
        one("constant_pad_value", {5, 4},
            [](const at::Tensor& x) { return at::constant_pad_nd(x, {0, 0, 1, -1}, 2.5); }),
        one("tril", {5, 4}, [](const at::Tensor& x) { return x.tril(); }),
        one("tril_above", {5, 7}, [](const at::Tensor& x) { return x.tril(2); }),
        one("triu", {3, 5, 4}, [](const at::Tensor& x) { return x.triu(-1); }),
        one("tril_in_place", {5, 4}, [](const at::Tensor& x) { return x.clone().tril_(1); }),
        one("trace", {5, 4}, [](const at::Tensor& x) { return x.trace(); }),
        one("repeat_interleave", {5, 4},
            [](const at::Tensor& x) { return x.repeat_interleave(2, 1); }),
        one("kron_parts", {5, 4}, [](const at::Tensor& x) { return at::kron(x, x); }),
    });

}  // namespace
}  // namespace tessera::brute_force
