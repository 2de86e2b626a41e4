// Operators on images and their like, [batch, channels, space...]: each channel of each sample by
// itself. The last one, two or three dimensions stay whole.
#include "dtensor/rules/common_rules.h"

#include <algorithm>

namespace tessera::dtensor {
namespace {

/// Batch and channels, and the sizes that an argument gives to space.
FindShapes sized_by(const char* argument, size_t results = 1) {
  return [=](const Call& call) {
    auto sizes = call.operand(0).sizes;
    const auto space = call.argument(argument).toIntVector();
    std::copy_backward(space.begin(), space.end(), sizes.end());
    return std::vector<Sizes>(results, sizes);
  };
}

/// Space as large as `padding` makes it: before and after each dimension, from the last.
std::vector<Sizes> padded_sizes(const Call& call) {
  auto sizes = call.operand(0).sizes;
  const auto padding = call.argument("padding").toIntVector();
  for (size_t i = 0; i < padding.size(); ++i) sizes[sizes.size() - 1 - i / 2] += padding[i];
  return {sizes};
}

/// Sums of results are the result of sums. Not where whole numbers are rounded.
Rule linear(Rule rule) {
  rule.rows = [rows = std::move(rule.rows)](const Call& call, int64_t ranks) {
    auto all = rows(call, ranks);
    if (c10::isFloatingType(call.operand(0).dtype)) all.push_back({Partial(), Partial()});
    return all;
  };
  return rule;
}

const Registration kMean2d({"aten::avg_pool2d"}, linear(alike_rule(leading_dims(2))));
const Registration kMean3d({"aten::avg_pool3d"}, linear(alike_rule(leading_dims(3))));
const Registration kPool2d({"aten::max_pool2d_with_indices", "aten::avg_pool2d_backward",
                            "aten::adaptive_max_pool2d", "aten::adaptive_max_pool2d_backward",
                            "aten::max_pool2d_with_indices_backward",
                            "aten::fractional_max_pool2d_backward"},
                           alike_rule(leading_dims(2)));
const Registration kPool3d({"aten::max_pool3d_with_indices", "aten::avg_pool3d_backward",
                            "aten::adaptive_max_pool3d", "aten::adaptive_max_pool3d_backward"},
                           alike_rule(leading_dims(3)));
const Registration kPad1d({"aten::reflection_pad1d", "aten::replication_pad1d"},
                          alike_rule(leading_dims(1), padded_sizes));
const Registration kPad2d({"aten::reflection_pad2d", "aten::replication_pad2d"},
                          alike_rule(leading_dims(2), padded_sizes));
const Registration kPad3d({"aten::reflection_pad3d", "aten::replication_pad3d"},
                          alike_rule(leading_dims(3), padded_sizes));

const Registration kGradient1d({"aten::reflection_pad1d_backward",
                                "aten::replication_pad1d_backward"},
                               alike_rule(leading_dims(1), sizes_of({1})));
const Registration kGradient2d({"aten::_adaptive_avg_pool2d_backward",
                                "aten::reflection_pad2d_backward",
                                "aten::replication_pad2d_backward"},
                               alike_rule(leading_dims(2), sizes_of({1})));
const Registration kGradient3d({"aten::_adaptive_avg_pool3d_backward",
                                "aten::max_pool3d_with_indices_backward",
                                "aten::reflection_pad3d_backward",
                                "aten::replication_pad3d_backward",
                                "aten::fractional_max_pool3d_backward"},
                               alike_rule(leading_dims(3), sizes_of({1})));
const Registration kSized2d({"aten::_adaptive_avg_pool2d", "aten::max_unpool2d"},
                            alike_rule(leading_dims(2), sized_by("output_size")));
const Registration kSized3d({"aten::_adaptive_avg_pool3d", "aten::max_unpool3d"},
                            alike_rule(leading_dims(3), sized_by("output_size")));

/// Random samples are [batch, channels, ...] even where the input has no batch.
FreeDims sampled_dims(int64_t space) {
  return [space](const Call& call) {
    return call.operand(0).ndim() == space + 2 ? std::vector<int64_t>{0, 1}
                                               : std::vector<int64_t>{};
  };
}
const Registration kFractional2d({"aten::fractional_max_pool2d"},
                                 alike_rule(sampled_dims(2), sized_by("output_size", 2)));
const Registration kFractional3d({"aten::fractional_max_pool3d"},
                                 alike_rule(sampled_dims(3), sized_by("output_size", 2)));

const std::vector<int64_t> kBatchAndChannel = {0, 1};
std::vector<int64_t> batch_and_channel(const Call&) { return kBatchAndChannel; }

const Registration kUpsample({"aten::upsample_nearest1d", "aten::upsample_nearest2d",
                              "aten::upsample_nearest3d", "aten::_upsample_nearest_exact1d",
                              "aten::_upsample_nearest_exact2d", "aten::_upsample_nearest_exact3d",
                              "aten::upsample_linear1d", "aten::upsample_bilinear2d",
                              "aten::upsample_trilinear3d", "aten::upsample_bicubic2d",
                              "aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa",
                              "aten::_upsample_lanczos2d_aa"},
                             linear(alike_rule(batch_and_channel)));

/// The gradient is as large as `input_size` says.
Rule upsample_backward_rule() {
  const auto global = [](const Call& call) { return call.argument("input_size").toIntVector(); };
  auto rule = alike_rule(batch_and_channel,
                         [=](const Call& call) { return std::vector<Sizes>{global(call)}; });
  rule.adapt = with_own_sizes("input_size", global);
  return rule;
}
const Registration kUpsampleBackward(
    {"aten::upsample_nearest1d_backward", "aten::upsample_nearest2d_backward",
     "aten::upsample_nearest3d_backward", "aten::_upsample_nearest_exact1d_backward",
     "aten::_upsample_nearest_exact2d_backward", "aten::_upsample_nearest_exact3d_backward",
     "aten::upsample_linear1d_backward", "aten::upsample_bilinear2d_backward",
     "aten::upsample_trilinear3d_backward", "aten::upsample_bicubic2d_backward",
     "aten::_upsample_bilinear2d_aa_backward", "aten::_upsample_bicubic2d_aa_backward",
     "aten::_upsample_lanczos2d_aa_backward"},
    linear(upsample_backward_rule()));

/// (input [n, c, space...], grid [n, points..., coordinates]) -> [n, c, points...]
Rows grid_rows(const Call& call, int64_t) {
  Rows rows = {{Shard(0), Shard(0), Shard(0)}, {Shard(1), Shard(1), Replicate()}};
  for (int64_t dim = 2; dim < call.operand(0).ndim(); ++dim)
    rows.push_back({Shard(dim), Replicate(), Shard(dim - 1)});
  return rows;
}

/// (grad_output, input, grid) -> (grad_input, grad_grid)
Rows grid_backward_rows(const Call& call, int64_t) {
  Rows rows = {{Shard(0), Shard(0), Shard(0), Shard(0), Shard(0)},
               {Shard(1), Partial(), Shard(1), Shard(1), Replicate()}};
  for (int64_t dim = 2; dim < call.operand(0).ndim(); ++dim)
    rows.push_back({Partial(), Shard(dim - 1), Shard(dim), Replicate(), Shard(dim - 1)});
  for (auto& row : rows) {
    if (!is_asked(call, 0)) row.placements[0] = Replicate();
  }
  return rows;
}

std::vector<Sizes> grid_sizes(const Call& call) {
  auto sizes = call.operand(1).sizes;  // [n, points..., coordinates]
  sizes.pop_back();
  sizes.insert(sizes.begin() + 1, call.operand(0).sizes[1]);
  return {sizes};
}

std::vector<Sizes> grid_backward_sizes(const Call& call) {
  return {is_asked(call, 0) ? call.operand(1).sizes : Sizes(), call.operand(2).sizes};
}

Rule grid_rule(Rows (*rows)(const Call&, int64_t), FindShapes shapes) {
  Rule rule;
  rule.rows = rows;
  rule.takes_any_indices = true;
  rule.shapes = std::move(shapes);
  return rule;
}
const Registration kGrid({"aten::grid_sampler_2d", "aten::grid_sampler_3d"},
                         grid_rule(grid_rows, grid_sizes));
const Registration kGridBackward({"aten::grid_sampler_2d_backward",
                                  "aten::grid_sampler_3d_backward"},
                                 grid_rule(grid_backward_rows, grid_backward_sizes));

/// theta [n, ...] -> a grid for images of `size` [n, c, space...]; the other way round in backward,
/// which is taken as a whole since by itself it makes a plain tensor of that size.
Rule affine_grid_rule(FindShapes shapes) {
  Rule rule;
  rule.rows = [](const Call&, int64_t) {
    return Rows{{Shard(0), Shard(0)}, {Partial(), Partial()}};
  };
  rule.adapt = [](const Call& call, const Choice& choice, LocalArguments& local) {
    auto size = call.argument("size").toIntVector();
    size[0] = own_sizes(choice, call.operand(0).sizes, choice.inputs[0])[0];
    local.set(call.index_of("size"), size);
  };
  rule.shapes = std::move(shapes);
  return rule;
}

std::vector<Sizes> grid_points(const Call& call) {
  auto sizes = call.argument("size").toIntVector();
  sizes.erase(sizes.begin() + 1);
  sizes.push_back(static_cast<int64_t>(sizes.size()) - 1);
  return {sizes};
}

std::vector<Sizes> affine_maps(const Call& call) {
  const auto size = call.argument("size").toIntVector();
  const auto ndim = static_cast<int64_t>(size.size()) - 2;
  return {{size[0], ndim, ndim + 1}};
}

const Registration kAffineGrid({"aten::affine_grid_generator"}, affine_grid_rule(grid_points));
const Registration kAffineGridBackward({"aten::affine_grid_generator_backward"},
                                       affine_grid_rule(affine_maps));

const Registration kChannelShuffle({"aten::channel_shuffle"}, alike_rule(
                                                                  [](const Call& call) {
                                                                    auto dims =
                                                                        leading_dims(0)(call);
                                                                    std::erase(dims, 1);
                                                                    return dims;
                                                                  },
                                                                  sizes_of({0})));

}  // namespace

// Operators that turn blocks of channels into blocks of space, or the other way round. Nothing
// leaves its chunk if the chunks are equal on both sides.

namespace {

/// `ndim` dimensions that argument and result share, of which the last `blocked` change their size.
Rows block_rows(const Call& call, int64_t ndim, int64_t blocked) {
  Rows rows;
  for (int64_t dim = 0; dim < ndim; ++dim) {
    auto row = call.row(Shard(dim));
    row[call.output_count()] = Shard(dim);
    rows.emplace_back(std::move(row), /*even=*/dim >= ndim - blocked);
  }
  return rows;
}

Rows shuffle_rows(const Call& call, int64_t) { return block_rows(call, call.operand(0).ndim(), 3); }

std::vector<Sizes> shuffle_sizes(const Call& call) {
  auto sizes = call.operand(0).sizes;
  auto* space = sizes.data() + sizes.size() - 2;
  if (call.has_argument("upscale_factor")) {
    const int64_t factor = call.argument("upscale_factor").toInt();
    space[-1] /= factor * factor;
    space[0] *= factor;
    space[1] *= factor;
  } else {
    const int64_t factor = call.argument("downscale_factor").toInt();
    space[-1] *= factor * factor;
    space[0] /= factor;
    space[1] /= factor;
  }
  return {sizes};
}

Rule block_rule(Rows (*rows)(const Call&, int64_t), FindShapes shapes) {
  Rule rule;
  rule.rows = rows;
  rule.shapes = std::move(shapes);
  return rule;
}

const Registration kPixelShuffle({"aten::pixel_shuffle", "aten::pixel_unshuffle"},
                                 block_rule(shuffle_rows, shuffle_sizes));

/// Sliding windows over [n, c, h, w] or [c, h, w] as columns, [n, c * window, windows] or
/// [c * window, windows].
Rows unfold_rows(const Call& call, int64_t) {
  return block_rows(call, call.operand(0).ndim() - 2, 1);
}
Rows fold_rows(const Call& call, int64_t) {
  return block_rows(call, call.operand(0).ndim() - 1, 1);
}

/// An argument for height and width, which may be one for both.
std::pair<int64_t, int64_t> pair_of(const Call& call, const char* argument) {
  const auto values = call.argument(argument).toIntVector();
  return {values.front(), values.back()};
}

int64_t window_size(const Call& call) {
  const auto [height, width] = pair_of(call, "kernel_size");
  return height * width;
}

std::vector<Sizes> unfold_sizes(const Call& call) {
  const auto kernel = pair_of(call, "kernel_size");
  const auto dilation = pair_of(call, "dilation");
  const auto padding = pair_of(call, "padding");
  const auto stride = pair_of(call, "stride");
  auto sizes = call.operand(0).sizes;
  const auto windows = [](int64_t length, int64_t kernel, int64_t dilation, int64_t padding,
                          int64_t stride) {
    return (length + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
  };
  const int64_t width =
      windows(sizes.back(), kernel.second, dilation.second, padding.second, stride.second);
  sizes.pop_back();
  const int64_t height =
      windows(sizes.back(), kernel.first, dilation.first, padding.first, stride.first);
  sizes.back() = height * width;
  sizes[sizes.size() - 2] *= window_size(call);
  return {sizes};
}

std::vector<Sizes> fold_sizes(const Call& call) {
  const auto [height, width] = pair_of(call, "output_size");
  auto sizes = call.operand(0).sizes;
  sizes[sizes.size() - 2] /= window_size(call);
  sizes.back() = height;
  sizes.push_back(width);
  return {sizes};
}

const Registration kIm2col({"aten::im2col"}, block_rule(unfold_rows, unfold_sizes));
const Registration kFold({"aten::col2im"}, block_rule(fold_rows, fold_sizes));

}  // namespace
}  // namespace tessera::dtensor
