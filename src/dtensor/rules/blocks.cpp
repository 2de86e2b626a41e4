// Operators that turn blocks of channels into blocks of space, or the other way round. Nothing
// leaves its chunk if the chunks are equal on both sides.
#include "dtensor/rules/free_dims.h"

namespace tessera::dtensor {
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
