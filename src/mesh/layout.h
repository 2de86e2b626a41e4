#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// The arithmetic of rank arrays. Knows no groups.
namespace tessera::mesh {

/// An n-dimensional array of ranks in row-major order.
struct Layout {
  std::vector<int64_t> shape;
  std::vector<int64_t> ranks;

  friend bool operator==(const Layout&, const Layout&) = default;
};

/// The dimensions of a layout that one dimension of its slice runs over, outermost first: one, or
/// several if the slice's dimension is flattened.
using Axis = std::vector<size_t>;

/// Product of the sizes, which are not negative; the greatest int64_t if that is too small for it.
int64_t element_count(const std::vector<int64_t>& shape);

/// Where `rank` stands; none if it does not.
std::optional<std::vector<int64_t>> find_coordinate(const Layout& layout, int64_t rank);

/// The sub-array through `origin` whose dimension d runs over the dimensions axes[d] of `layout`.
Layout slice(const Layout& layout, const std::vector<int64_t>& origin,
             const std::vector<Axis>& axes);

/// A rank that stands more than once; none if all differ.
std::optional<int64_t> find_duplicate(std::vector<int64_t> ranks);

/// "[[0, 1], [2, 3]]"; more than 64 ranks: "[0, 1, 2, ..., 1023]".
std::string to_text(const Layout& layout);
/// "[2, 3]", shortened like a layout.
std::string to_text(const std::vector<int64_t>& numbers);
/// "\"dp\", \"tp\""
std::string to_text(const std::vector<std::string>& names);

}  // namespace tessera::mesh

/// What a mesh demands of its arguments. Each check throws c10::ValueError whose text opens with
/// `caller`.
namespace tessera::mesh {

/// At least one dimension, all positive, product = `world_size`.
void check_shape(const char* caller, const std::vector<int64_t>& shape, int64_t world_size);
/// At least one rank, all in the world, no two equal.
void check_ranks(const char* caller, const std::vector<int64_t>& ranks, int64_t world_size);
/// No names, or a name for each of `ndim` dimensions, not empty, no two equal.
void check_dim_names(const char* caller, const std::vector<std::string>& dim_names, int64_t ndim);
/// `mesh_dim` counted from the start; negative ones count from the end.
int64_t wrap_mesh_dim(const char* caller, int64_t mesh_dim, int64_t ndim);

}  // namespace tessera::mesh
