#include "mesh/layout.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace tessera::mesh {

namespace {

constexpr size_t kMaxPrinted = 64;

/// How far apart in `ranks` two neighbours along each dimension are.
std::vector<size_t> strides(const std::vector<int64_t>& shape) {
  std::vector<size_t> result(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;)
    result[dim - 1] = result[dim] * static_cast<size_t>(shape[dim]);
  return result;
}

/// Repeats every offset of `offsets` at each of `size` steps along one more, innermost, dimension.
std::vector<size_t> extend(const std::vector<size_t>& offsets, int64_t size, size_t stride) {
  std::vector<size_t> extended;
  extended.reserve(offsets.size() * static_cast<size_t>(size));
  for (size_t offset : offsets) {
    for (int64_t index = 0; index < size; ++index)
      extended.push_back(offset + static_cast<size_t>(index) * stride);
  }
  return extended;
}

void append_nested(std::string& text, const Layout& layout, size_t dim, size_t& next) {
  text += '[';
  for (int64_t index = 0; index < layout.shape[dim]; ++index) {
    if (index > 0) text += ", ";
    if (dim + 1 == layout.shape.size()) {
      text += std::to_string(layout.ranks[next++]);
    } else {
      append_nested(text, layout, dim + 1, next);
    }
  }
  text += ']';
}

}  // namespace

int64_t element_count(const std::vector<int64_t>& shape) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t count = 1;
  for (int64_t size : shape) {
    if (count > kMax / size) return kMax;
    count *= size;
  }
  return count;
}

std::optional<std::vector<int64_t>> find_coordinate(const Layout& layout, int64_t rank) {
  const auto found = std::find(layout.ranks.begin(), layout.ranks.end(), rank);
  if (found == layout.ranks.end()) return std::nullopt;
  int64_t position = found - layout.ranks.begin();
  std::vector<int64_t> coordinate(layout.shape.size());
  for (size_t dim = layout.shape.size(); dim-- > 0;) {
    coordinate[dim] = position % layout.shape[dim];
    position /= layout.shape[dim];
  }
  return coordinate;
}

Layout slice(const Layout& layout, const std::vector<int64_t>& origin,
             const std::vector<Axis>& axes) {
  const std::vector<size_t> stride = strides(layout.shape);
  std::vector<bool> runs(layout.shape.size(), false);
  for (const Axis& axis : axes) {
    for (size_t dim : axis) runs[dim] = true;
  }
  size_t start = 0;
  for (size_t dim = 0; dim < origin.size(); ++dim) {
    if (!runs[dim]) start += static_cast<size_t>(origin[dim]) * stride[dim];
  }

  Layout result;
  std::vector<size_t> offsets = {start};
  for (const Axis& axis : axes) {
    int64_t size = 1;
    for (size_t dim : axis) {
      offsets = extend(offsets, layout.shape[dim], stride[dim]);
      size *= layout.shape[dim];
    }
    result.shape.push_back(size);
  }
  result.ranks.reserve(offsets.size());
  for (size_t offset : offsets) result.ranks.push_back(layout.ranks[offset]);
  return result;
}

std::optional<int64_t> find_duplicate(std::vector<int64_t> ranks) {
  std::sort(ranks.begin(), ranks.end());
  const auto found = std::adjacent_find(ranks.begin(), ranks.end());
  if (found == ranks.end()) return std::nullopt;
  return *found;
}

std::string to_text(const Layout& layout) {
  if (layout.ranks.size() > kMaxPrinted) {
    std::string text = "[";
    for (size_t index = 0; index < 3; ++index) text += std::to_string(layout.ranks[index]) + ", ";
    return text + "..., " + std::to_string(layout.ranks.back()) + "]";
  }
  std::string text;
  size_t next = 0;
  append_nested(text, layout, 0, next);
  return text;
}

std::string to_text(const std::vector<int64_t>& numbers) {
  return to_text(Layout{{static_cast<int64_t>(numbers.size())}, numbers});
}

std::string to_text(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "\"" : ", \"") + name + "\"";
  return text;
}

void check_shape(const char* caller, const std::vector<int64_t>& shape, int64_t world_size) {
  TORCH_CHECK_VALUE(!shape.empty(), caller,
                    ": expected at least one dimension, got an empty shape; pass {", world_size,
                    "} for a 1-D mesh of all ranks");
  for (int64_t size : shape) {
    TORCH_CHECK_VALUE(size > 0, caller, ": expected positive sizes, got shape ", to_text(shape),
                      "; give every dimension at least size 1");
  }
  const int64_t count = element_count(shape);
  TORCH_CHECK_VALUE(count == world_size, caller,
                    ": expected a shape whose product is the world size ", world_size, ", got ",
                    to_text(shape), " with product ", count,
                    "; change the shape, start as many ranks, or list the ranks of a smaller mesh "
                    "with DeviceMesh");
}

void check_ranks(const char* caller, const std::vector<int64_t>& ranks, int64_t world_size) {
  TORCH_CHECK_VALUE(!ranks.empty(), caller,
                    ": expected at least one rank, got none; list world ranks");
  for (int64_t rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, caller, ": expected ranks from 0 to ",
                      world_size - 1, ", got rank ", rank, " in ", to_text(ranks),
                      "; list ranks of the world, or start more than its ", world_size);
  }
  const auto duplicate = find_duplicate(ranks);
  TORCH_CHECK_VALUE(!duplicate, caller, ": expected distinct ranks, got rank ",
                    duplicate.value_or(0), " more than once in ", to_text(ranks),
                    "; list every rank once, or use init_device_mesh to build a mesh from a shape");
}

void check_dim_names(const char* caller, const std::vector<std::string>& dim_names, int64_t ndim) {
  if (dim_names.empty()) return;
  TORCH_CHECK_VALUE(static_cast<int64_t>(dim_names.size()) == ndim, caller, ": expected ", ndim,
                    " dim_names, one per dimension, got ", dim_names.size(), " (",
                    to_text(dim_names), "); name every dimension or none");
  for (auto name = dim_names.begin(); name != dim_names.end(); ++name) {
    TORCH_CHECK_VALUE(!name->empty(), caller, ": expected non-empty dim_names, got ",
                      to_text(dim_names), "; name every dimension or none");
    TORCH_CHECK_VALUE(std::find(dim_names.begin(), name, *name) == name, caller,
                      ": expected distinct dim_names, got \"", *name, "\" more than once in ",
                      to_text(dim_names), "; give every dimension its own name");
  }
}

int64_t wrap_mesh_dim(const char* caller, int64_t mesh_dim, int64_t ndim) {
  TORCH_CHECK_VALUE(mesh_dim >= -ndim && mesh_dim < ndim, caller, ": expected a mesh_dim from ",
                    -ndim, " to ", ndim - 1, ", got ", mesh_dim, "; the mesh has ", ndim,
                    ndim == 1 ? " dimension" : " dimensions");
  return mesh_dim < 0 ? mesh_dim + ndim : mesh_dim;
}

}  // namespace tessera::mesh
