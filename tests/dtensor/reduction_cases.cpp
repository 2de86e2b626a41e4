#include "dtensor/brute_force.h"

#include <torch/torch.h>

#include <limits>

namespace tessera::brute_force {
namespace {

Case reduce(const char* name, OfOne function, Input input = {5, 4, 3}) {
  return {
      name, {std::move(input)}, [function](const Tensors& x) { return Tensors{function(x[0])}; }};
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const std::vector<int64_t> kOuter = {0, 2};

const Cases kSums(
    "reductions",
    {
        reduce("sum", [](const at::Tensor& x) { return x.sum(); }),
        reduce("sum_dim", [](const at::Tensor& x) { return x.sum(1); }),
        reduce("sum_dims", [](const at::Tensor& x) { return x.sum(kOuter); }),
        reduce("sum_keepdim", [](const at::Tensor& x) { return x.sum({-2}, true); }),
        reduce("sum_double", [](const at::Tensor& x) { return x.sum(0, false, at::kDouble); }),
        reduce("sum_no_dims", [](const at::Tensor& x) { return x.sum(at::IntArrayRef{}, true); }),
        reduce("sum_scalar", [](const at::Tensor& x) { return x.sum().sum(); }),
        forward_only(reduce(
            "sum_to_integers", [](const at::Tensor& x) { return (x * 4).sum(0, false, at::kLong); },
            distinct({5, 4}))),
        forward_only(reduce(
            "sum_integers", [](const at::Tensor& x) { return x.sum(0); }, index({5, 4}, 9))),
        forward_only(reduce(
            "sum_bools", [](const at::Tensor& x) { return x.sum(1); }, boolean({5, 4}))),
        reduce("nansum", [](const at::Tensor& x) { return x.nansum(kOuter); }),
        reduce("mean", [](const at::Tensor& x) { return x.mean(); }),
        reduce("mean_dim", [](const at::Tensor& x) { return x.mean(1); }),
        reduce("mean_dims",
               [](const at::Tensor& x) { return x.mean(at::IntArrayRef({0, -1}), true); }),
        reduce("mean_even", [](const at::Tensor& x) { return x.mean(0); }, {12, 4}),
        reduce("mean_few", [](const at::Tensor& x) { return x.mean(0); }, {2, 3}),
        reduce(
            "prod", [](const at::Tensor& x) { return x.prod(); }, positive({3, 4})),
        reduce(
            "prod_dim", [](const at::Tensor& x) { return x.prod(0); }, positive({5, 4})),
        reduce(
            "prod_keepdim", [](const at::Tensor& x) { return x.prod(1, true); }, positive({5, 4})),
        forward_only(reduce("count_nonzero",
                            [](const at::Tensor& x) {
                              return at::relu(x).count_nonzero(at::IntArrayRef({1}));
                            })),
        forward_only(reduce("count_all",
                            [](const at::Tensor& x) { return at::relu(x).count_nonzero(); })),
        forward_only(reduce("count_dims",
                            [](const at::Tensor& x) { return at::relu(x).count_nonzero(kOuter); })),
        forward_only({"mean_out",
                      {{5, 4}, {4}},
                      [](const Tensors& x) {
                        auto out = at::zeros_like(x[1]);
                        at::mean_out(out, x[0], {0});
                        return Tensors{out};
                      }}),
    });

const Cases kExtremes(
    "reductions",
    {
        forward_only(reduce(
            "all", [](const at::Tensor& x) { return x.all(); }, boolean({5, 4}))),
        forward_only(reduce(
            "all_dim", [](const at::Tensor& x) { return x.all(1); }, boolean({5, 4}))),
        forward_only(reduce(
            "all_dims", [](const at::Tensor& x) { return x.all(kOuter, true); },
            boolean({5, 2, 2}))),
        forward_only(reduce(
            "all_no_dims", [](const at::Tensor& x) { return x.all(at::IntArrayRef{}); },
            index({5, 4}, 2))),
        forward_only(reduce(
            "any_bytes", [](const at::Tensor& x) { return x.to(at::kByte).any(0); },
            index({5, 4}, 2))),
        forward_only(reduce(
            "any", [](const at::Tensor& x) { return x.any(); }, boolean({5, 4}))),
        forward_only(reduce(
            "any_dim", [](const at::Tensor& x) { return x.any(0, true); }, boolean({5, 4}))),
        reduce(
            "amax", [](const at::Tensor& x) { return x.amax(1); }, distinct({5, 4, 3})),
        reduce(
            "amax_all", [](const at::Tensor& x) { return x.amax(); }, distinct({5, 4, 3})),
        reduce(
            "amin", [](const at::Tensor& x) { return x.amin(kOuter, true); }, distinct({5, 4, 3})),
        reduce(
            "max", [](const at::Tensor& x) { return x.max(); }, distinct({5, 4, 3})),
        reduce(
            "min", [](const at::Tensor& x) { return x.min(); }, distinct({5, 4, 3})),
        {"max_dim", {distinct({5, 4, 3})}, [](const Tensors& x) { return both(x[0].max(1)); }},
        {"min_dim",
         {distinct({5, 4, 3})},
         [](const Tensors& x) { return both(x[0].min(0, true)); }},
        {"aminmax",
         {distinct({5, 4, 3})},
         [](const Tensors& x) { return both(x[0].aminmax(1)); },
         false},
        {"aminmax_all",
         {distinct({5, 4})},
         [](const Tensors& x) { return both(x[0].aminmax()); },
         false},
        forward_only(reduce(
            "argmax", [](const at::Tensor& x) { return x.argmax(1); }, distinct({5, 4, 3}))),
        forward_only(reduce("argmax_of_equals",
                            [](const at::Tensor& x) { return (x > 0).to(at::kInt).argmax(0); })),
        forward_only(reduce("argmin_of_nan",
                            [](const at::Tensor& x) { return (x.sqrt() + 1).argmin(0, true); })),
        forward_only(reduce(
            "argmin", [](const at::Tensor& x) { return x.argmin(-1, true); }, distinct({5, 4, 3}))),
        forward_only(reduce(
            "argmax_all", [](const at::Tensor& x) { return x.argmax(); }, distinct({5, 4}))),
        reduce("logsumexp", [](const at::Tensor& x) { return x.logsumexp(1); }),
        {"median_dim",
         {distinct({5, 4, 3})},
         [](const Tensors& x) { return both(x[0].median(1)); }},
        reduce(
            "median", [](const at::Tensor& x) { return x.median(); }, distinct({5, 3})),
        {"nanmedian",
         {distinct({5, 4})},
         [](const Tensors& x) { return both(x[0].nanmedian(0, true)); }},
        {"kthvalue",
         {distinct({5, 4})},
         [](const Tensors& x) { return both(x[0].kthvalue(2, 0)); }},
        {"mode", {distinct({5, 4})}, [](const Tensors& x) { return both(x[0].mode(1)); }},
    });

const Cases kForms("reductions",
                   {
                       forward_only({"_aminmax",
                                     {distinct({5, 4})},
                                     [](const Tensors& x) { return both(at::_aminmax(x[0])); }}),
                       forward_only({"_aminmax_dim",
                                     {distinct({5, 4})},
                                     [](const Tensors& x) { return both(at::_aminmax(x[0], 1)); }}),
                       forward_only({"max_dim_out",
                                     {distinct({5, 4})},
                                     [](const Tensors& x) {
                                       auto values = at::zeros_like(x[0].sum(1));
                                       auto indices = at::zeros_like(values, at::kLong);
                                       at::max_out(values, indices, x[0], 1);
                                       return Tensors{values, indices};
                                     }}),
                       forward_only({"min_dim_out",
                                     {distinct({5, 4})},
                                     [](const Tensors& x) {
                                       auto values = at::zeros_like(x[0].sum(0));
                                       auto indices = at::zeros_like(values, at::kLong);
                                       at::min_out(values, indices, x[0], 0);
                                       return Tensors{values, indices};
                                     }}),
                   });

const Cases kMoments(
    "reductions",
    {
        reduce("var", [](const at::Tensor& x) { return x.var(1); }),
        reduce("var_all", [](const at::Tensor& x) { return x.var(); }),
        reduce("std",
               [](const at::Tensor& x) { return x.std(at::IntArrayRef({0, 1}), false, true); }),
        {"var_mean", {{5, 4}}, [](const Tensors& x) { return both(at::var_mean(x[0], 0)); }},
        {"std_mean", {{5, 4}}, [](const Tensors& x) { return both(at::std_mean(x[0], 1)); }},
        reduce("norm", [](const at::Tensor& x) { return x.norm(); }),
        reduce("norm_dim", [](const at::Tensor& x) { return x.norm(2, 1); }),
        reduce("norm_keepdim",
               [](const at::Tensor& x) { return x.norm(3, at::IntArrayRef({0, 2}), true); }),
        reduce(
            "norm_one", [](const at::Tensor& x) { return x.norm(1); }, distinct({5, 4})),
        reduce("vector_norm", [](const at::Tensor& x) { return at::linalg_vector_norm(x, 2, 0); }),
        reduce(
            "vector_norm_few", [](const at::Tensor& x) { return at::linalg_vector_norm(x, 2.5); },
            positive({2, 1})),
        reduce(
            "vector_norm_negative",
            [](const at::Tensor& x) { return at::linalg_vector_norm(x, -1, 0); }, positive({2, 3})),
        reduce(
            "vector_norm_max",
            [](const at::Tensor& x) { return at::linalg_vector_norm(x, kInfinity, 0); },
            distinct({2, 3})),
        reduce(
            "vector_norm_min",
            [](const at::Tensor& x) { return at::linalg_vector_norm(x + 7, -kInfinity, 0, true); },
            distinct({2, 3})),
        forward_only(reduce("vector_norm_zero",
                            [](const at::Tensor& x) {
                              return at::linalg_vector_norm(at::relu(x), 0, 1);
                            })),
        forward_only(reduce("vector_norm_half",
                            [](const at::Tensor& x) {
                              return at::linalg_vector_norm(x, 2, 1, false, at::kDouble);
                            })),
    });

const char* const kPowsum = "aten::linalg__powsum";
const Cases kPowsums("reductions",
                     has_operator(kPowsum)
                         ? std::vector<Case>{forward_only(reduce("powsum",
                                                                 [](const at::Tensor& x) {
                                                                   return call_by_name(
                                                                       kPowsum,
                                                                       {x, 3, kOuter, false,
                                                                        c10::IValue()});
                                                                 }))}
                         : std::vector<Case>{});

const Cases kDistances("reductions",
                       {
                           {"dist",
                            {{5, 4}, {5, 4}},
                            [](const Tensors& x) { return Tensors{at::dist(x[0], x[1], 3)}; }},
                           {"dist_broadcast",
                            {{5, 4}, {4}},
                            [](const Tensors& x) { return Tensors{at::dist(x[0], x[1])}; }},
                       });

const Cases kSoftmax(
    "softmax",
    {
        reduce("softmax", [](const at::Tensor& x) { return x.softmax(-1); }),
        reduce("softmax_inner", [](const at::Tensor& x) { return x.softmax(1); }),
        reduce("log_softmax", [](const at::Tensor& x) { return x.log_softmax(0); }),
        reduce("log_softmax_few", [](const at::Tensor& x) { return x.log_softmax(1); }, {2, 3}),
        reduce("log_sigmoid", [](const at::Tensor& x) { return at::log_sigmoid(x); }),
        reduce("safe_softmax", [](const at::Tensor& x) { return at::_safe_softmax(x, 2); }),
        {"masked_softmax",
         {{3, 2, 4, 4}, boolean({3, 2, 4, 4})},
         [](const Tensors& x) {
           return Tensors{at::_masked_softmax(x[0], x[1], std::nullopt, 2)};
         }},
    });

}  // namespace
}  // namespace tessera::brute_force
