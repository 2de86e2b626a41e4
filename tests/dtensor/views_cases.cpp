#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

using Sizes = std::vector<int64_t>;

Case view_case(const char* name, Sizes sizes, OfOne function) {
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
  return view_case(name, std::move(before), [after](const at::Tensor& x) { return x.view(after); });
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
        view_case("flatten", {3, 4, 2}, [](const at::Tensor& x) { return x.flatten(1); }),
        view_case("unflatten", {5, 6}, [](const at::Tensor& x) { return x.unflatten(1, {2, 3}); }),
        view_case("reshape_of_transposed", {4, 6},
                  [](const at::Tensor& x) { return x.t().reshape({8, 3}); }),
        view_case("view_of_sum", {4, 6},
                  [](const at::Tensor& x) { return (x + x).view({2, 2, 6}); }),
        view_case("unsafe_view", {4, 6},
                  [](const at::Tensor& x) { return at::_unsafe_view(x, {24}); }),
        view_case("view_copy", {4, 6},
                  [](const at::Tensor& x) { return at::view_copy(x, {4, 2, 3}); }),
        view_case("permute", {5, 3, 2}, [](const at::Tensor& x) { return x.permute({2, 0, 1}); }),
        view_case("permute_copy", {5, 3},
                  [](const at::Tensor& x) { return at::permute_copy(x, {1, 0}); }),
        view_case("transpose", {5, 3, 2}, [](const at::Tensor& x) { return x.transpose(0, -1); }),
        view_case("transpose_copy", {5, 3},
                  [](const at::Tensor& x) { return at::transpose_copy(x, 0, 1); }),
        view_case("t", {5, 3}, [](const at::Tensor& x) { return x.t(); }),
        view_case("t_of_vector", {5}, [](const at::Tensor& x) { return x.t(); }),
        view_case("t_copy", {5, 3}, [](const at::Tensor& x) { return at::t_copy(x); }),
        view_case("movedim", {5, 3, 2}, [](const at::Tensor& x) { return x.movedim(0, 2); }),
        view_case("expand", {5, 1}, [](const at::Tensor& x) { return x.expand({5, 3}); }),
        view_case("expand_new", {5, 1}, [](const at::Tensor& x) { return x.expand({2, -1, 3}); }),
        view_case("expand_copy", {5, 1},
                  [](const at::Tensor& x) { return at::expand_copy(x, {5, 3}); }),
        view_case("repeat", {5, 3}, [](const at::Tensor& x) { return x.repeat({1, 2}); }),
        view_case("repeat_new", {5, 3}, [](const at::Tensor& x) { return x.repeat({2, 1, 1}); }),
        view_case("tile", {5, 3}, [](const at::Tensor& x) { return x.tile({2}); }),
        view_case("unsqueeze", {5, 3}, [](const at::Tensor& x) { return x.unsqueeze(1); }),
        view_case("unsqueeze_copy", {5, 3},
                  [](const at::Tensor& x) { return at::unsqueeze_copy(x, -1); }),
        view_case("squeeze", {4, 1, 3, 1}, [](const at::Tensor& x) { return x.squeeze(); }),
        view_case("squeeze_of_parts_of_one", {4, 3},
                  [](const at::Tensor& x) { return x.squeeze(); }),
        view_case("squeeze_dim", {4, 1, 3}, [](const at::Tensor& x) { return x.squeeze(1); }),
        view_case("squeeze_dim_that_is_longer", {4, 3},
                  [](const at::Tensor& x) { return x.squeeze(0); }),
        view_case("squeeze_dims", {4, 1, 1, 3},
                  [](const at::Tensor& x) { return x.squeeze({0, 2}); }),
        view_case("squeeze_copy", {4, 1, 3},
                  [](const at::Tensor& x) { return at::squeeze_copy(x); }),
        view_case("unfold", {5, 6}, [](const at::Tensor& x) { return x.unfold(1, 3, 2); }),
        view_case("unfold_copy", {5, 6},
                  [](const at::Tensor& x) { return at::unfold_copy(x, 1, 2, 2); }),
        view_case("diagonal", {5, 3, 4}, [](const at::Tensor& x) { return x.diagonal(1, 0, 2); }),
        view_case("diagonal_copy", {5, 3},
                  [](const at::Tensor& x) { return at::diagonal_copy(x); }),
        view_case("diag_embed", {5, 3}, [](const at::Tensor& x) { return x.diag_embed(1, 0, 2); }),
        view_case("view_as_complex", {5, 3, 2},
                  [](const at::Tensor& x) { return at::view_as_real(at::view_as_complex(x)); }),
        view_case("view_as_complex_of_slice", {5, 3, 4},
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
        view_case("slice", {5, 4}, [](const at::Tensor& x) { return x.slice(0, 1, 4); }),
        view_case("slice_steps", {5, 4}, [](const at::Tensor& x) { return x.slice(0, 1, 5, 2); }),
        view_case("slice_from_end", {5, 4}, [](const at::Tensor& x) { return x.slice(1, -3, -1); }),
        view_case("slice_of_all", {5, 4}, [](const at::Tensor& x) { return x.slice(0); }),
        view_case("slice_of_more_than_all", {5, 4},
                  [](const at::Tensor& x) { return x.slice(0, -9, 100); }),
        view_case("slice_of_nothing", {5, 4}, [](const at::Tensor& x) { return x.slice(0, 3, 3); }),
        view_case("slice_copy", {5, 4},
                  [](const at::Tensor& x) { return at::slice_copy(x, 0, 1, 4); }),
        view_case("select", {5, 4, 2}, [](const at::Tensor& x) { return x.select(1, -1); }),
        view_case("select_copy", {5, 4},
                  [](const at::Tensor& x) { return at::select_copy(x, 0, 2); }),
        view_case("narrow", {5, 4}, [](const at::Tensor& x) { return x.narrow(1, 1, 2); }),
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
        view_case("roll", {5, 4}, [](const at::Tensor& x) { return x.roll({1}, {1}); }),
        view_case("roll_flat", {5, 4}, [](const at::Tensor& x) { return x.roll({3}); }),
        view_case("flip", {5, 4}, [](const at::Tensor& x) { return x.flip({0}); }),
        view_case("rot90", {5, 4, 2}, [](const at::Tensor& x) { return x.rot90(1, {0, 1}); }),
        view_case("rot90_twice", {5, 4}, [](const at::Tensor& x) { return x.rot90(2, {0, 1}); }),
        view_case("constant_pad", {5, 4},
                  [](const at::Tensor& x) { return at::constant_pad_nd(x, {1, 2}); }),
        view_case("constant_pad_value", {5, 4},
                  [](const at::Tensor& x) { return at::constant_pad_nd(x, {0, 0, 1, -1}, 2.5); }),
        view_case("tril", {5, 4}, [](const at::Tensor& x) { return x.tril(); }),
        view_case("tril_above", {5, 7}, [](const at::Tensor& x) { return x.tril(2); }),
        view_case("triu", {3, 5, 4}, [](const at::Tensor& x) { return x.triu(-1); }),
        view_case("tril_in_place", {5, 4}, [](const at::Tensor& x) { return x.clone().tril_(1); }),
        view_case("trace", {5, 4}, [](const at::Tensor& x) { return x.trace(); }),
        view_case("repeat_interleave", {5, 4},
                  [](const at::Tensor& x) { return x.repeat_interleave(2, 1); }),
        view_case("kron_parts", {5, 4}, [](const at::Tensor& x) { return at::kron(x, x); }),
    });

}  // namespace
}  // namespace tessera::brute_force
