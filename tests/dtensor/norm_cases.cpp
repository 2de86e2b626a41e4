#include <tessera/dtensor.h>

#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

template <class Tuple>
Tensors first_of(Tuple tuple) {
  return {std::get<0>(tuple)};
}

/// A copy that is whole on every rank; of a plain tensor a plain copy.
at::Tensor whole(const at::Tensor& tensor) {
  const auto value = tensor.detach();
  if (!is_dtensor(value)) return value.clone();
  const auto distributed = DTensor::of(value);
  return distributed.redistribute(Placements(distributed.placements().size())).clone();
}

Case batch_norm(const char* name, Input input, bool training) {
  const int64_t channels = input.sizes[1];
  return {name,
          {std::move(input), {channels}, {channels}, {channels}, positive({channels})},
          [training](const Tensors& x) {
            return Tensors{at::batch_norm(x[0], x[1], x[2], x[3].detach(), x[4].detach(), training,
                                          0.1, 1e-5, false)};
          }};
}

const Cases kNorms(
    "norms",
    {
        {"layer_norm",
         {{5, 3, 4}, {4}, {4}},
         [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {4}, x[1], x[2])}; }},
        {"layer_norm_two",
         {{5, 2, 4}, {2, 4}, {2, 4}},
         [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {2, 4}, x[1], x[2])}; }},
        {"layer_norm_few",
         {{2, 4}, {4}, {4}},
         [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {4}, x[1], x[2])}; }},
        {"layer_norm_plain",
         {{5, 3, 4}},
         [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {4})}; }},
        {"layer_norm_weight",
         {{5, 4}, {4}},
         [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {4}, x[1])}; }},
        {"rms_norm",
         {{5, 3, 4}, {4}},
         [](const Tensors& x) { return Tensors{at::rms_norm(x[0], {4}, x[1], 1e-5)}; }},
        {"group_norm",
         {{5, 4, 3}, {4}, {4}},
         [](const Tensors& x) { return Tensors{at::group_norm(x[0], 2, x[1], x[2])}; }},
        {"group_norm_many",
         {{3, 8, 2, 2}, {8}, {8}},
         [](const Tensors& x) { return Tensors{at::group_norm(x[0], 4, x[1], x[2])}; }},
        {"group_norm_plain",
         {{5, 6, 3}},
         [](const Tensors& x) { return Tensors{at::group_norm(x[0], 3)}; }},
        {"instance_norm",
         {{3, 4, 5}, {4}, {4}},
         [](const Tensors& x) {
           return Tensors{at::instance_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false)};
         }},
        {"batch_norm_training",
         {{5, 3, 4}, {3}, {3}},
         [](const Tensors& x) {
           return Tensors{at::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false)};
         },
         true,
         1e-3},
        {"batch_norm_running",
         {{5, 3}, {3}, {3}, {3}, positive({3})},
         [](const Tensors& x) {
           const auto mean = whole(x[3]);
           const auto variance = whole(x[4]);
           return Tensors{at::batch_norm(x[0], x[1], x[2], mean, variance, true, 0.1, 1e-5, false),
                          mean, variance};
         },
         true,
         1e-3},
        batch_norm("batch_norm_eval", {5, 3, 4}, false),
        batch_norm("batch_norm_eval_images", {3, 5, 2, 2}, false),
        {"batch_norm_legit_functional",
         {{5, 3, 2}, {3}, {3}, {3}, positive({3})},
         [](const Tensors& x) {
           const auto results = at::_native_batch_norm_legit_functional(x[0], x[1], x[2], x[3],
                                                                        x[4], true, 0.1, 1e-5);
           return Tensors{std::get<0>(results), std::get<3>(results), std::get<4>(results)};
         },
         false},
        {"weight_norm",
         {{5, 4}, {5, 1}},
         [](const Tensors& x) { return Tensors{at::_weight_norm(x[0], x[1], 0)}; }},
        {"weight_norm_last",
         {{5, 4}, {1, 4}},
         [](const Tensors& x) { return Tensors{at::_weight_norm(x[0], x[1], 1)}; }},
        {"renorm", {{5, 4}}, [](const Tensors& x) { return Tensors{x[0].renorm(2, 0, 1.0)}; }},
    });

using Attention = std::function<at::Tensor(const Tensors&)>;
Case attend(const char* name, std::vector<Input> inputs, Attention attention) {
  return {name, std::move(inputs), [attention](const Tensors& x) { return Tensors{attention(x)}; }};
}

const Cases kAttention(
    "attention",
    {
        attend("heads", {{3, 4, 5, 8}, {3, 4, 6, 8}, {3, 4, 6, 8}},
               [](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2]); }),
        attend("causal", {{3, 4, 5, 8}, {3, 4, 5, 8}, {3, 4, 5, 8}},
               [](const Tensors& x) {
                 return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true);
               }),
        attend("masked", {{3, 4, 5, 8}, {3, 4, 6, 8}, {3, 4, 6, 8}, {5, 6}},
               [](const Tensors& x) {
                 return at::scaled_dot_product_attention(x[0], x[1], x[2], x[3].detach());
               }),
        attend("masked_heads", {{3, 4, 5, 8}, {3, 4, 6, 8}, {3, 4, 6, 8}, {3, 1, 5, 6}},
               [](const Tensors& x) {
                 return at::scaled_dot_product_attention(x[0], x[1], x[2], x[3].detach());
               }),
        attend("shared_heads", {{2, 8, 5, 8}, {2, 4, 6, 8}, {2, 4, 6, 8}},
               [](const Tensors& x) {
                 return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, false,
                                                         std::nullopt, /*enable_gqa=*/true);
               }),
        attend("scaled", {{2, 3, 4, 8}, {2, 3, 4, 8}, {2, 3, 4, 8}},
               [](const Tensors& x) {
                 return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, false, 0.3);
               }),
    });

const Cases kLegit("norms", {
                                {"batch_norm_legit",
                                 {{5, 3, 4}, {3}, {3}, {3}, positive({3})},
                                 [](const Tensors& x) {
                                   auto mean = whole(x[3]);
                                   auto variance = whole(x[4]);
                                   const auto results = at::_native_batch_norm_legit(
                                       x[0], x[1], x[2], mean, variance,
                                       /*training=*/true, 0.1, 1e-5);
                                   return Tensors{std::get<0>(results), mean, variance};
                                 }},
                                {"batch_norm_legit_no_stats",
                                 {{5, 3, 4}, {3}, {3}},
                                 [](const Tensors& x) {
                                   return first_of(at::_native_batch_norm_legit(
                                       x[0], x[1], x[2], /*training=*/true, 0.1, 1e-5));
                                 }},
                                {"batch_norm_legit_no_training",
                                 {{5, 3, 4}, {3}, {3}, {3}, positive({3})},
                                 [](const Tensors& x) {
                                   return first_of(at::_native_batch_norm_legit_no_training(
                                       x[0], x[1], x[2], x[3].detach(), x[4].detach(), 0.1, 1e-5));
                                 }},
                            });

}  // namespace
}  // namespace tessera::brute_force
