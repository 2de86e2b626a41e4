// Operators on images and their like, [batch, channels, space...]: each channel of each sample by
// itself. The last one, two or three dimensions stay whole.
#include "dtensor/rules/free_dims.h"
#include "dtensor/rules/passages.h"

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
}  // namespace tessera::dtensor
