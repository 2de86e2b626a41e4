#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

Case image_case(const char* name, std::vector<Input> inputs, OfSeveral function,
                double tolerance = 2e-4) {
  return {name, std::move(inputs), [function](const Tensors& x) { return Tensors{function(x)}; },
          true, tolerance};
}

const Cases kConvolution(
    "convolution",
    {
        image_case(
            "conv1d", {{3, 4, 7}, {5, 4, 3}, {5}},
            [](const Tensors& x) { return at::conv1d(x[0], x[1], x[2]); }, 1e-3),
        image_case(
            "conv2d", {{3, 4, 6, 5}, {6, 4, 3, 3}, {6}},
            [](const Tensors& x) { return at::conv2d(x[0], x[1], x[2], 2, 1); }, 1e-3),
        image_case(
            "conv2d_unbatched", {{4, 6, 5}, {2, 4, 3, 3}, {2}},
            [](const Tensors& x) { return at::conv2d(x[0], x[1], x[2]); }, 1e-3),
        image_case(
            "conv2d_no_bias", {{3, 4, 6, 5}, {6, 4, 3, 2}},
            [](const Tensors& x) {
              return at::conv2d(x[0], x[1], {}, 1, at::IntArrayRef({1, 0}), 2 - 1);
            },
            1e-3),
        image_case(
            "conv2d_dilated", {{2, 3, 7, 6}, {4, 3, 2, 3}, {4}},
            [](const Tensors& x) { return at::conv2d(x[0], x[1], x[2], 1, 1, 2); }, 1e-3),
        image_case(
            "conv2d_groups", {{3, 8, 5, 4}, {8, 2, 3, 3}, {8}},
            [](const Tensors& x) { return at::conv2d(x[0], x[1], x[2], 1, 1, 1, 4); }, 1e-3),
        image_case(
            "conv2d_depthwise", {{3, 6, 5, 4}, {12, 1, 3, 3}, {12}},
            [](const Tensors& x) { return at::conv2d(x[0], x[1], x[2], 1, 1, 1, 6); }, 1e-3),
        image_case(
            "conv3d", {{2, 3, 4, 3, 3}, {4, 3, 2, 2, 2}, {4}},
            [](const Tensors& x) { return at::conv3d(x[0], x[1], x[2]); }, 1e-3),
        image_case(
            "conv_transpose2d", {{3, 4, 4, 3}, {4, 5, 3, 3}, {5}},
            [](const Tensors& x) { return at::conv_transpose2d(x[0], x[1], x[2], 2, 1, 1); }, 1e-3),
        image_case(
            "conv_transpose2d_groups", {{3, 8, 4, 3}, {8, 2, 3, 3}, {8}},
            [](const Tensors& x) { return at::conv_transpose2d(x[0], x[1], x[2], 2, 1, 0, 4); },
            1e-3),
    });

const Cases kPooling(
    "pooling",
    {
        image_case("max_pool1d", {distinct({3, 5, 6})},
                   [](const Tensors& x) { return at::max_pool1d(x[0], 2); }),
        image_case("max_pool2d", {distinct({3, 5, 6, 4})},
                   [](const Tensors& x) { return at::max_pool2d(x[0], 2); }),
        {"max_pool2d_with_indices",
         {distinct({3, 5, 6, 4})},
         [](const Tensors& x) { return both(at::max_pool2d_with_indices(x[0], 3, 2, 1)); }},
        image_case("max_pool2d_unbatched", {distinct({5, 6, 4})},
                   [](const Tensors& x) { return at::max_pool2d(x[0], 2); }),
        image_case("max_pool3d", {distinct({3, 4, 4, 4, 4})},
                   [](const Tensors& x) { return at::max_pool3d(x[0], 2); }),
        image_case("avg_pool1d", {{3, 5, 6}},
                   [](const Tensors& x) { return at::avg_pool1d(x[0], 2); }),
        image_case("avg_pool2d", {{3, 5, 6, 4}},
                   [](const Tensors& x) { return at::avg_pool2d(x[0], 3, 2, 1, true, false); }),
        image_case("avg_pool3d", {{3, 2, 4, 4, 4}},
                   [](const Tensors& x) { return at::avg_pool3d(x[0], 2); }),
        image_case("adaptive_avg_pool1d", {{3, 5, 6}},
                   [](const Tensors& x) { return at::adaptive_avg_pool1d(x[0], 4); }),
        image_case("adaptive_avg_pool2d", {{3, 5, 6, 4}},
                   [](const Tensors& x) { return at::adaptive_avg_pool2d(x[0], {4, 3}); }),
        image_case("adaptive_avg_pool2d_one", {{3, 5, 6, 4}},
                   [](const Tensors& x) { return at::adaptive_avg_pool2d(x[0], {1, 1}); }),
        image_case("adaptive_avg_pool3d", {{3, 2, 4, 4, 4}},
                   [](const Tensors& x) { return at::adaptive_avg_pool3d(x[0], {3, 3, 3}); }),
        {"adaptive_max_pool2d",
         {distinct({3, 5, 6, 4})},
         [](const Tensors& x) { return both(at::adaptive_max_pool2d(x[0], {4, 3})); }},
        {"adaptive_max_pool3d",
         {distinct({3, 2, 4, 4, 4})},
         [](const Tensors& x) { return both(at::adaptive_max_pool3d(x[0], {2, 3, 2})); }},
        {"fractional_max_pool2d",
         {distinct({3, 5, 6, 6}), unit({3, 5, 2})},
         [](const Tensors& x) {
           return both(at::fractional_max_pool2d(x[0], {2, 2}, {3, 3}, x[1].detach()));
         }},
        {"fractional_max_pool3d",
         {distinct({3, 2, 5, 5, 5}), unit({3, 2, 3})},
         [](const Tensors& x) {
           return both(at::fractional_max_pool3d(x[0], {2, 2, 2}, {3, 3, 3}, x[1].detach()));
         }},
        image_case("max_unpool2d", {distinct({3, 5, 6, 4})},
                   [](const Tensors& x) {
                     const auto [pooled, indices] = at::max_pool2d_with_indices(x[0], 2);
                     return at::max_unpool2d(pooled, indices, {6, 4});
                   }),
        image_case("max_unpool3d", {distinct({3, 2, 4, 4, 4})},
                   [](const Tensors& x) {
                     const auto [pooled, indices] = at::max_pool3d_with_indices(x[0], 2);
                     return at::max_unpool3d(pooled, indices, {4, 4, 4}, {2, 2, 2}, {0, 0, 0});
                   }),
    });

const Cases kSampling(
    "sampling",
    {
        image_case("reflection_pad1d", {{3, 5, 6}},
                   [](const Tensors& x) { return at::reflection_pad1d(x[0], {2, 1}); }),
        image_case("reflection_pad2d", {{3, 5, 6, 4}},
                   [](const Tensors& x) { return at::reflection_pad2d(x[0], {2, 1, 0, 3}); }),
        image_case("reflection_pad3d", {{3, 2, 4, 4, 4}},
                   [](const Tensors& x) { return at::reflection_pad3d(x[0], {2, 1, 0, 3, 1, 1}); }),
        image_case("replication_pad1d", {{5, 6}},
                   [](const Tensors& x) { return at::replication_pad1d(x[0], {2, 1}); }),
        image_case("replication_pad2d", {{3, 5, 6, 4}},
                   [](const Tensors& x) { return at::replication_pad2d(x[0], {2, 1, 0, 3}); }),
        image_case("replication_pad3d", {{3, 2, 4, 4, 4}},
                   [](const Tensors& x) {
                     return at::replication_pad3d(x[0], {2, 1, 0, 3, 1, 1});
                   }),
        image_case("nearest1d", {{3, 5, 4}},
                   [](const Tensors& x) { return at::upsample_nearest1d(x[0], {7}); }),
        image_case("nearest2d", {{3, 5, 4, 3}},
                   [](const Tensors& x) { return at::upsample_nearest2d(x[0], {7, 6}); }),
        image_case("nearest3d", {{3, 2, 4, 3, 2}},
                   [](const Tensors& x) { return at::upsample_nearest3d(x[0], {7, 6, 4}); }),
        image_case("nearest_exact1d", {{3, 5, 4}},
                   [](const Tensors& x) { return at::_upsample_nearest_exact1d(x[0], {7}); }),
        image_case("nearest_exact2d", {{3, 5, 4, 3}},
                   [](const Tensors& x) { return at::_upsample_nearest_exact2d(x[0], {7, 6}); }),
        image_case("nearest_exact3d", {{3, 2, 4, 3, 2}},
                   [](const Tensors& x) { return at::_upsample_nearest_exact3d(x[0], {7, 6, 4}); }),
        image_case("linear1d", {{3, 5, 4}},
                   [](const Tensors& x) { return at::upsample_linear1d(x[0], {7}, false); }),
        image_case("bilinear2d", {{3, 5, 4, 3}},
                   [](const Tensors& x) { return at::upsample_bilinear2d(x[0], {7, 6}, true); }),
        image_case("trilinear3d", {{3, 2, 4, 3, 2}},
                   [](const Tensors& x) {
                     return at::upsample_trilinear3d(x[0], {7, 6, 4}, false);
                   }),
        image_case("bicubic2d", {{3, 5, 4, 3}},
                   [](const Tensors& x) { return at::upsample_bicubic2d(x[0], {7, 6}, false); }),
        image_case("bilinear2d_aa", {{3, 5, 6, 8}},
                   [](const Tensors& x) {
                     return at::_upsample_bilinear2d_aa(x[0], {3, 4}, false);
                   }),
        image_case("lanczos2d_aa", {{3, 5, 6, 8}},
                   [](const Tensors& x) {
                     return call_by_name("aten::_upsample_lanczos2d_aa",
                                         {x[0], std::vector<int64_t>{3, 4}, false, {}, {}});
                   }),
        image_case("bicubic2d_aa", {{3, 5, 6, 8}},
                   [](const Tensors& x) {
                     return at::_upsample_bicubic2d_aa(x[0], {3, 4}, false);
                   }),
        image_case("nearest2d_backward", {{3, 5, 7, 6}},
                   [](const Tensors& x) {
                     return at::upsample_nearest2d_backward(x[0], {7, 6}, {3, 5, 4, 3});
                   }),
        image_case("trilinear3d_backward", {{3, 2, 7, 6, 4}},
                   [](const Tensors& x) {
                     return at::upsample_trilinear3d_backward(x[0], {7, 6, 4}, {3, 2, 4, 3, 2},
                                                              false);
                   }),
        forward_only(image_case("affine_grid_backward", {{5, 4, 3, 2}},
                                [](const Tensors& x) {
                                  return at::affine_grid_generator_backward(x[0], {5, 2, 4, 3},
                                                                            false);
                                })),
        image_case(
            "grid_sampler_2d", {{3, 2, 4, 5}, {3, 5, 3, 2}},
            [](const Tensors& x) { return at::grid_sampler_2d(x[0], x[1] * 0.5, 0, 0, false); },
            2e-3),
        image_case(
            "grid_sampler_3d", {{3, 2, 4, 3, 3}, {3, 2, 3, 2, 3}},
            [](const Tensors& x) { return at::grid_sampler_3d(x[0], x[1] * 0.5, 0, 1, true); },
            2e-3),
        image_case("affine_grid", {{5, 2, 3}},
                   [](const Tensors& x) {
                     return at::affine_grid_generator(x[0], {5, 2, 4, 3}, false);
                   }),
        image_case("pixel_shuffle", {{3, 16, 2, 4}},
                   [](const Tensors& x) { return at::pixel_shuffle(x[0], 2); }),
        image_case("pixel_shuffle_uneven", {{3, 12, 3, 5}},
                   [](const Tensors& x) { return at::pixel_shuffle(x[0], 2); }),
        image_case("pixel_unshuffle", {{3, 4, 8, 6}},
                   [](const Tensors& x) { return at::pixel_unshuffle(x[0], 2); }),
        image_case("channel_shuffle", {{3, 6, 5}},
                   [](const Tensors& x) { return at::channel_shuffle(x[0], 2); }),
        image_case("im2col", {{3, 4, 5, 6}},
                   [](const Tensors& x) {
                     return at::im2col(x[0], {2, 3}, {1, 1}, {1, 0}, {2, 1});
                   }),
        image_case("col2im", {{3, 12, 20}},
                   [](const Tensors& x) {
                     return at::col2im(x[0], {6, 5}, {2, 2}, {1, 1}, {0, 0}, {1, 1});
                   }),
    });

const Cases kConvolutionForm("convolution", {
                                                {"_convolution",
                                                 {{3, 4, 6}, {2, 4, 3}, {2}},
                                                 [](const Tensors& x) {
                                                   return Tensors{at::_convolution(
                                                       x[0], x[1], x[2], {1}, {1}, {1}, false, {0},
                                                       1, false, false, false, false)};
                                                 },
                                                 /*backward=*/false},
                                            });

}  // namespace
}  // namespace tessera::brute_force
