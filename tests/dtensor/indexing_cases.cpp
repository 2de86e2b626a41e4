#include <tessera/dtensor.h>

#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

using torch::indexing::Slice;

/// A copy of which ranks hold rows; of a plain tensor a plain copy.
at::Tensor by_rows(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return tensor.clone();
  const auto distributed = DTensor::of(tensor);
  return distributed.redistribute(Placements(distributed.placements().size(), Shard(0))).clone();
}

/// One result.
Case index_case(const char* name, std::vector<Input> inputs,
                std::function<at::Tensor(const Tensors&)> function) {
  return {name, std::move(inputs), [function](const Tensors& x) { return Tensors{function(x)}; }};
}

const Cases kGather(
    "gather",
    {
        index_case("gather", {{5, 4}, index({5, 3}, 4)},
                   [](const Tensors& x) { return x[0].gather(1, x[1]); }),
        index_case("gather_rows", {{5, 4}, index({3, 4}, 5)},
                   [](const Tensors& x) { return x[0].gather(0, x[1]); }),
        index_case("gather_fewer", {{5, 4}, index({2, 3}, 5)},
                   [](const Tensors& x) { return x[0].gather(0, x[1]); }),
        index_case("take_along_dim", {{5, 4}, index({5, 2}, 4)},
                   [](const Tensors& x) { return at::take_along_dim(x[0], x[1], 1); }),
        forward_only(index_case("gather_ints", {index({5, 4}, 9), index({5, 3}, 4)},
                                [](const Tensors& x) { return x[0].gather(1, x[1]); })),
        forward_only(index_case("gather_bools", {boolean({5, 4}), index({5, 3}, 4)},
                                [](const Tensors& x) { return x[0].gather(1, x[1]); })),
        index_case("scatter_value", {{5, 4}, index({5, 2}, 4)},
                   [](const Tensors& x) { return x[0].scatter(1, x[1], 2.0); }),
        index_case("scatter_add", {{5, 4}, index({5, 3}, 4), {5, 3}},
                   [](const Tensors& x) { return x[0].scatter_add(1, x[1], x[2]); }),
        index_case("scatter_add_rows", {{5, 4}, index({3, 4}, 5), {3, 4}},
                   [](const Tensors& x) { return x[0].scatter_add(0, x[1], x[2]); }),
        index_case("scatter_add_in_place", {{5, 4}, index({5, 3}, 4), {5, 3}},
                   [](const Tensors& x) {
                     return at::zeros_like(x[0]).scatter_add_(1, x[1], x[2]) + x[0];
                   }),
        forward_only(index_case("scatter_in_place", {{5, 4}, index({5, 1}, 4), {5, 1}},
                                [](const Tensors& x) {
                                  return at::zeros_like(x[0]).scatter_(1, x[1], x[2]) + x[0];
                                })),
        index_case("scatter_reduce", {distinct({5, 4}), index({5, 3}, 4), distinct({5, 3})},
                   [](const Tensors& x) { return x[0].scatter_reduce(1, x[1], x[2], "amax"); }),
        index_case("scatter_src_of_one", {{5, 4}, index({5, 1}, 4), {5, 1}},
                   [](const Tensors& x) { return x[0].scatter(1, x[1], x[2]); }),
    });

const Cases kIndex(
    "index",
    {
        index_case("index", {{5, 4}, index({3}, 5)},
                   [](const Tensors& x) { return x[0].index({x[1]}); }),
        index_case("index_last", {{5, 4}, index({3}, 4)},
                   [](const Tensors& x) { return x[0].index({Slice(), x[1]}); }),
        index_case("index_matrix", {{5, 4}, index({3, 2}, 5)},
                   [](const Tensors& x) { return x[0].index({x[1]}); }),
        index_case("index_pairs", {{5, 4, 3}, index({6}, 4), index({6}, 3)},
                   [](const Tensors& x) { return x[0].index({Slice(), x[1], x[2]}); }),
        index_case("index_apart", {{5, 4, 3}, index({6}, 5), index({6}, 3)},
                   [](const Tensors& x) { return x[0].index({x[1], Slice(), x[2]}); }),
        index_case("index_broadcast", {{5, 4, 3}, index({2, 1}, 5), index({3}, 3)},
                   [](const Tensors& x) { return x[0].index({x[1], Slice(), x[2]}); }),
        forward_only(index_case("index_mask", {{5, 4}, boolean({5})},
                                [](const Tensors& x) { return x[0].index({x[1]}); })),
        forward_only(index_case("index_put", {{5, 4}, index({1}, 5), {1, 4}},
                                [](const Tensors& x) { return x[0].index_put({x[1]}, x[2]); })),
        index_case("index_put_accumulate", {{5, 4}, index({3}, 5), {3, 4}},
                   [](const Tensors& x) { return x[0].index_put({x[1]}, x[2], true); }),
        index_case("index_put_columns", {{5, 4}, index({3}, 4), {5, 3}},
                   [](const Tensors& x) { return x[0].index_put({{}, x[1]}, x[2], true); }),
        index_case("index_put_broadcast", {{5, 4}, index({3}, 4), {5, 1}},
                   [](const Tensors& x) { return x[0].index_put({{}, x[1]}, x[2], true); }),
        index_case("index_put_in_place", {{5, 4}, index({3}, 5), {3, 4}},
                   [](const Tensors& x) {
                     return at::zeros_like(x[0]).index_put_({x[1]}, x[2], true) + x[0];
                   }),
        index_case("index_put_pairs_in_place", {{5, 4}, index({6}, 5), index({6}, 4), {6}},
                   [](const Tensors& x) {
                     return at::zeros_like(x[0]).index_put_({x[1] - 2, x[2]}, x[3], true) + x[0];
                   }),
        forward_only(index_case("put", {{5, 4}, index({3, 2}, 20), {6}},
                                [](const Tensors& x) {
                                  return at::zeros_like(x[0]).put_(x[1] - 5, x[2], true) + x[0];
                                })),
        index_case("index_select", {{5, 4}, index({3}, 5)},
                   [](const Tensors& x) { return x[0].index_select(0, x[1]); }),
        index_case("index_select_last", {{5, 4}, index({6}, 4)},
                   [](const Tensors& x) { return x[0].index_select(-1, x[1]); }),
        index_case("index_add", {{5, 4}, index({3}, 5), {3, 4}},
                   [](const Tensors& x) { return x[0].index_add(0, x[1], x[2], 2); }),
        index_case("index_add_in_place", {{5, 4}, index({3}, 5), {3, 4}},
                   [](const Tensors& x) {
                     return at::zeros_like(x[0]).index_add_(0, x[1], x[2]) + x[0];
                   }),
        index_case("index_fill_in_place", {{5, 4}, index({2}, 5)},
                   [](const Tensors& x) {
                     return at::zeros_like(x[0]).index_fill_(0, x[1] - 1, 2.0) + x[0];
                   }),
        index_case("index_copy", {{5, 4}, index({1}, 5), {1, 4}},
                   [](const Tensors& x) { return x[0].index_copy(0, x[1], x[2]); }),
        index_case("index_fill", {{5, 4}, index({3}, 4)},
                   [](const Tensors& x) { return x[0].index_fill(1, x[1], 2.0); }),
        forward_only(index_case("index_reduce", {{5, 4}, index({3}, 4), {5, 3}},
                                [](const Tensors& x) {
                                  return x[0].index_reduce(1, x[1], x[2], "amax");
                                })),
        index_case("take", {{5, 4}, index({3, 2}, 20)},
                   [](const Tensors& x) { return x[0].take(x[1]); }),
        forward_only(index_case("masked_select", {{5, 4}, boolean({5, 4})},
                                [](const Tensors& x) { return x[0].masked_select(x[1]); })),
        index_case("masked_scatter", {{5, 4}, boolean({5, 4}), {20}},
                   [](const Tensors& x) { return x[0].masked_scatter(x[1], x[2]); }),
        forward_only(index_case("nonzero", {boolean({5, 4})},
                                [](const Tensors& x) { return x[0].nonzero(); })),
    });

const Cases kEmbedding(
    "embedding",
    {
        index_case("embedding", {{5, 4}, index({3}, 5)},
                   [](const Tensors& x) { return at::embedding(x[0], x[1]); }),
        index_case("embedding_of_batch", {{7, 4}, index({5, 3}, 7)},
                   [](const Tensors& x) { return at::embedding(x[0], x[1]); }),
        index_case("embedding_padding", {{5, 4}, index({5, 3}, 5)},
                   [](const Tensors& x) { return at::embedding(x[0], x[1], /*padding_idx=*/2); }),
        index_case("embedding_by_frequency", {{5, 4}, index({5, 3}, 5)},
                   [](const Tensors& x) {
                     return at::embedding(x[0], x[1], /*padding_idx=*/4,
                                          /*scale_grad_by_freq=*/true);
                   }),
        forward_only(index_case("embedding_backward", {{3, 2, 4}, index({3, 2}, 5)},
                                [](const Tensors& x) {
                                  return at::embedding_dense_backward(x[0], x[1], 5, 1, false);
                                })),
        forward_only(index_case("embedding_renorm", {{5, 4}, index({3}, 5)},
                                [](const Tensors& x) {
                                  auto weight = by_rows(x[0]);
                                  return at::embedding_renorm_(weight, x[1], 1.0, 2.0);
                                })),
        forward_only(index_case("one_hot", {index({5}, 4)},
                                [](const Tensors& x) { return at::one_hot(x[0], 4); })),
        forward_only(index_case("one_hot_of_largest", {index({5}, 4)},
                                [](const Tensors& x) { return at::one_hot(x[0]); })),
    });

const Cases kOrdering(
    "ordering",
    {
        {"sort",
         {distinct({5, 4})},
         [](const Tensors& x) {
           const auto [values, indices] = x[0].sort(1);
           return Tensors{values, indices};
         }},
        {"sort_stable_descending",
         {distinct({5, 4})},
         [](const Tensors& x) {
           const auto [values, indices] = x[0].sort(/*stable=*/true, 0, /*descending=*/true);
           return Tensors{values, indices};
         }},
        index_case("argsort", {distinct({5, 4})},
                   [](const Tensors& x) { return x[0].argsort(int64_t{0}); }),
        {"topk",
         {distinct({5, 4})},
         [](const Tensors& x) {
           const auto [values, indices] = x[0].topk(2, 0);
           return Tensors{values, indices};
         }},
        {"kthvalue",
         {distinct({5, 4})},
         [](const Tensors& x) {
           const auto [values, indices] = x[0].kthvalue(2, 1);
           return Tensors{values, indices};
         }},
        {"median",
         {distinct({5, 4})},
         [](const Tensors& x) {
           const auto [values, indices] = x[0].median(0, true);
           return Tensors{values, indices, x[0].median()};
         }},
        {"mode",
         {distinct({5, 4})},
         [](const Tensors& x) {
           const auto [values, indices] = x[0].mode(0);
           return Tensors{values, indices};
         }},
        index_case("cumsum", {{5, 4}}, [](const Tensors& x) { return x[0].cumsum(0); }),
        index_case("cumsum_wider", {{5, 4}},
                   [](const Tensors& x) { return x[0].cumsum(1, at::kDouble); }),
        index_case("cumprod", {{5, 4}}, [](const Tensors& x) { return x[0].cumprod(1); }),
        {"cummax",
         {distinct({5, 4})},
         [](const Tensors& x) {
           const auto [values, indices] = x[0].cummax(1);
           return Tensors{values, indices};
         }},
        {"cummin",
         {distinct({5, 4})},
         [](const Tensors& x) {
           const auto [values, indices] = x[0].cummin(0);
           return Tensors{values, indices};
         }},
        index_case("logcumsumexp", {{5, 4}}, [](const Tensors& x) { return x[0].logcumsumexp(1); }),
        forward_only(index_case("histc", {{5, 4}},
                                [](const Tensors& x) { return x[0].histc(6, -2, 2); })),
        forward_only(index_case("histc_of_range", {{5, 4}},
                                [](const Tensors& x) { return x[0].histc(6); })),
        forward_only(index_case("bucketize", {{5, 4}, unit({3})},
                                [](const Tensors& x) {
                                  return at::bucketize(x[0], x[1].cumsum(0).detach());
                                })),
        forward_only(index_case("searchsorted", {unit({5, 4}), {5, 3}},
                                [](const Tensors& x) {
                                  return at::searchsorted(x[0].cumsum(1), x[1]);
                                })),
        forward_only(index_case("searchsorted_common", {unit({4}), {5, 3}},
                                [](const Tensors& x) {
                                  return at::searchsorted(x[0].cumsum(0), x[1]);
                                })),
        forward_only(index_case("isin", {index({5, 4}, 9), index({3}, 9)},
                                [](const Tensors& x) { return at::isin(x[0], x[1]); })),
        forward_only({"unique",
                      {index({5, 4}, 9)},
                      [](const Tensors& x) { return Tensors{std::get<0>(at::_unique2(x[0]))}; }}),
    });

using Indices = c10::List<std::optional<at::Tensor>>;

const Cases kUnchecked(
    "index",
    {
        index_case("unsafe_index", {{5, 4}, index({3}, 5)},
                   [](const Tensors& x) { return at::_unsafe_index(x[0], Indices{x[1]}); }),
        index_case("unsafe_index_put", {{5, 4}, index({3}, 5), {3, 4}},
                   [](const Tensors& x) {
                     return at::_unsafe_index_put(x[0], Indices{x[1]}, x[2], /*accumulate=*/true);
                   }),
        forward_only(index_case("unsafe_masked_index",
                                {{5, 4}, boolean({3, 4}), index({3, 1}, 5), index({4}, 4)},
                                [](const Tensors& x) {
                                  return at::_unsafe_masked_index(x[0], x[1], Indices{x[2], x[3]},
                                                                  2.5);
                                })),
        forward_only(index_case("unsafe_masked_index_put",
                                {{5, 4}, boolean({3, 4}), index({3, 1}, 5), index({4}, 4), {3, 4}},
                                [](const Tensors& x) {
                                  return at::_unsafe_masked_index_put_accumulate(
                                      x[0], x[1], Indices{x[2], x[3]}, x[4]);
                                })),
        index_case("index_put_impl", {{5, 4}, index({3}, 5), {3, 4}},
                   [](const Tensors& x) {
                     auto target = x[0].clone();
                     at::_index_put_impl_(target, Indices{x[1]}, x[2], /*accumulate=*/true);
                     return target;
                   }),
        forward_only(index_case("nonzero_static", {boolean({5, 4})},
                                [](const Tensors& x) { return at::nonzero_static(x[0], 12); })),
        forward_only(index_case("isin_scalar", {index({5, 4}, 6)},
                                [](const Tensors& x) { return at::isin(x[0], 3); })),
        forward_only(index_case("repeat_interleave", {index({5}, 4)},
                                [](const Tensors& x) { return at::repeat_interleave(x[0]); })),
        forward_only(index_case("searchsorted_scalar", {distinct({7})},
                                [](const Tensors& x) {
                                  return at::searchsorted(std::get<0>(x[0].sort()), 0.6);
                                })),
        forward_only(index_case("stack_inner", {{5, 4}, {5, 4}},
                                [](const Tensors& x) { return at::_stack({x[0], x[1]}, 1); })),
    });

const Cases kUnique("index", {
                                 {"unique",
                                  {index({5, 4}, 6)},
                                  [](const Tensors& x) {
                                    const auto [values, inverse] = at::_unique(x[0], true, true);
                                    return Tensors{values, inverse};
                                  },
                                  /*backward=*/false},
                                 {"unique_consecutive",
                                  {index({7}, 3)},
                                  [](const Tensors& x) {
                                    const auto [values, inverse, counts] =
                                        at::unique_consecutive(x[0], true, true);
                                    return Tensors{values, inverse, counts};
                                  },
                                  /*backward=*/false},
                                 {"unique_dim",
                                  {index({5, 2}, 2)},
                                  [](const Tensors& x) {
                                    const auto [values, inverse, counts] =
                                        at::unique_dim(x[0], 0, true, true, true);
                                    return Tensors{values, inverse, counts};
                                  },
                                  /*backward=*/false},
                                 {"unique_dim_consecutive",
                                  {index({5, 2}, 2)},
                                  [](const Tensors& x) {
                                    const auto [values, inverse, counts] =
                                        at::unique_dim_consecutive(x[0], 0, true, true);
                                    return Tensors{values, inverse, counts};
                                  },
                                  /*backward=*/false},
                             });

}  // namespace
}  // namespace tessera::brute_force
