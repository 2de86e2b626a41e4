#include <tessera/dtensor.h>

#include "dtensor/part.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

namespace tessera {
namespace {

using Range = std::pair<int64_t, int64_t>;  // from, up to

std::string text_of(const Range& range) { return c10::str(range.first, ":", range.second); }

std::string padded(const std::string& text, size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
}

/// Owners of each block, by its rows and columns.
std::map<std::pair<Range, Range>, std::vector<int>> blocks_of(const DTensor& tensor) {
  std::map<std::pair<Range, Range>, std::vector<int>> blocks;
  for (const auto& shard : tensor.shards()) {
    if (std::find(shard.length.begin(), shard.length.end(), 0) != shard.length.end()) continue;
    const auto range = [&](size_t dim) {
      return Range{shard.offset[dim], shard.offset[dim] + shard.length[dim]};
    };
    const auto rows = tensor.dim() > 1 ? range(0) : Range{0, 1};
    blocks[{rows, range(tensor.dim() > 1 ? 1 : 0)}].push_back(shard.owner);
  }
  return blocks;
}

}  // namespace

std::string visualize_sharding(const at::Tensor& tensor) {
  const auto distributed = DTensor::of(tensor);
  TORCH_CHECK_VALUE(tensor.dim() == 1 || tensor.dim() == 2,
                    "visualize_sharding: expected a tensor of 1 or 2 dimensions, got ",
                    tensor.dim(), "; flatten it, or look at DTensor::shards()");
  const auto blocks = blocks_of(distributed);
  std::set<Range> rows;
  std::set<Range> columns;
  for (const auto& [place, owners] : blocks) {
    rows.insert(place.first);
    columns.insert(place.second);
  }
  const auto cell = [&](const Range& row, const Range& column) -> std::string {
    const auto found = blocks.find({row, column});
    if (found == blocks.end()) return "-";
    std::string text;
    for (const int owner : found->second) text += c10::str(text.empty() ? "" : ",", owner);
    return text;
  };
  size_t width = 6;
  for (const auto& column : columns) width = std::max(width, text_of(column).size());
  for (const auto& [place, owners] : blocks)
    width = std::max(width, cell(place.first, place.second).size());
  width += 2;

  std::ostringstream out;
  out << "ranks of each block, " << tensor.sizes() << ' ' << distributed.placements() << '\n';
  out << padded(tensor.dim() > 1 ? "rows" : "", width);
  for (const auto& column : columns) out << padded(text_of(column), width);
  out << '\n';
  for (const auto& row : rows) {
    out << padded(tensor.dim() > 1 ? text_of(row) : "", width);
    for (const auto& column : columns) out << padded(cell(row, column), width);
    out << '\n';
  }
  return out.str();
}

}  // namespace tessera
