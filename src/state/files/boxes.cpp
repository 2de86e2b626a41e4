#include "state/files/boxes.h"

#include <algorithm>
#include <set>
#include <utility>

namespace tessera::state {

int64_t volume(const std::vector<int64_t>& length) {
  int64_t elements = 1;
  for (const auto size : length) elements *= size;
  return elements;
}

std::optional<Box> intersect(const Box& left, const Box& right) {
  Box both;
  for (size_t dim = 0; dim < left.offset.size(); ++dim) {
    const auto begin = std::max(left.offset[dim], right.offset[dim]);
    const auto end =
        std::min(left.offset[dim] + left.length[dim], right.offset[dim] + right.length[dim]);
    if (begin >= end) return std::nullopt;
    both.offset.push_back(begin);
    both.length.push_back(end - begin);
  }
  return both;
}

bool is_grid(const std::vector<int64_t>& shape, const std::vector<Box>& boxes) {
  if (volume(shape) == 0) return boxes.empty();
  // Distinct cells of a product of partitions, as many as it has, are all of them.
  size_t cells = 1;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    std::set<std::pair<int64_t, int64_t>> intervals;
    for (const auto& box : boxes) intervals.emplace(box.offset[dim], box.length[dim]);
    int64_t end = 0;
    for (const auto& [offset, length] : intervals) {
      if (offset != end || length <= 0 || length > shape[dim] - end) return false;
      end += length;
    }
    if (end != shape[dim] || intervals.size() > boxes.size() / cells) return false;
    cells *= intervals.size();
  }
  return boxes.size() == cells && std::set<Box>(boxes.begin(), boxes.end()).size() == cells;
}

std::vector<Run> runs_between(const Box& from, const Box& to, uint64_t element_bytes) {
  const auto both = intersect(from, to);
  if (!both) return {};
  const auto dims = static_cast<int64_t>(both->offset.size());
  // Dimensions behind `last` are whole in both, so that bytes are consecutive from there on.
  int64_t last = dims - 1;
  uint64_t inner = element_bytes;
  for (; last >= 0; --last) {
    const bool is_whole =
        both->length[last] == from.length[last] && both->length[last] == to.length[last];
    inner *= static_cast<uint64_t>(both->length[last]);
    if (!is_whole) break;
  }
  std::vector<uint64_t> from_stride(dims, element_bytes);
  std::vector<uint64_t> to_stride(dims, element_bytes);
  for (int64_t dim = dims - 2; dim >= 0; --dim) {
    from_stride[dim] = from_stride[dim + 1] * static_cast<uint64_t>(from.length[dim + 1]);
    to_stride[dim] = to_stride[dim + 1] * static_cast<uint64_t>(to.length[dim + 1]);
  }
  Run run{.bytes = inner};
  for (int64_t dim = 0; dim < dims; ++dim) {
    run.from += from_stride[dim] * static_cast<uint64_t>(both->offset[dim] - from.offset[dim]);
    run.to += to_stride[dim] * static_cast<uint64_t>(both->offset[dim] - to.offset[dim]);
  }
  std::vector<Run> runs;
  std::vector<int64_t> index(std::max<int64_t>(last, 0), 0);
  while (true) {
    runs.push_back(run);
    int64_t dim = static_cast<int64_t>(index.size()) - 1;
    for (; dim >= 0; --dim) {  // the next row, as an odometer counts
      run.from += from_stride[dim];
      run.to += to_stride[dim];
      if (++index[dim] < both->length[dim]) break;
      run.from -= from_stride[dim] * static_cast<uint64_t>(both->length[dim]);
      run.to -= to_stride[dim] * static_cast<uint64_t>(both->length[dim]);
      index[dim] = 0;
    }
    if (dim < 0) return runs;
  }
}

}  // namespace tessera::state
