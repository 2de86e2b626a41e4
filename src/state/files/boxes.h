#pragma once

#include <cstdint>
#include <optional>
#include <vector>

/// Parts of tensors as boxes.
namespace tessera::state {

struct Box {
  std::vector<int64_t> offset;  // of the first element, along each dimension
  std::vector<int64_t> length;

  friend auto operator<=>(const Box&, const Box&) = default;
};

int64_t volume(const std::vector<int64_t>& length);
/// What both have; none if nothing.
std::optional<Box> intersect(const Box& left, const Box& right);

/// Whether the boxes, which are not empty, cover a tensor of this shape, each element once, and are
/// the cells of a grid, as the parts of every distributed tensor are.
bool is_grid(const std::vector<int64_t>& shape, const std::vector<Box>& boxes);

/// Bytes that lie one behind the other in both of two row-major boxes.
struct Run {
  uint64_t from = 0;  // first byte in the one
  uint64_t to = 0;    // in the other
  uint64_t bytes = 0;
};
/// How to copy what `from` and `to` both have, in ascending order of `from`.
std::vector<Run> runs_between(const Box& from, const Box& to, uint64_t element_bytes);

}  // namespace tessera::state
