#pragma once

#include <tessera/dtensor/placement.h>

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

/// The arithmetic of placements: who holds which part. Knows neither tensors nor groups.
namespace tessera::dtensor {

using Sizes = std::vector<int64_t>;

/// An interval of a tensor dimension.
struct Chunk {
  int64_t offset = 0;
  int64_t length = 0;

  friend bool operator==(const Chunk&, const Chunk&) = default;
};

/// The part of rank `rank` of `ranks` of an interval of this size: ceil(size / ranks) each, what is
/// left for the last, nothing for those after it.
Chunk chunk_of(int64_t size, int64_t ranks, int64_t rank);

// Note [order of sharding]
// Several mesh dimensions may shard one tensor dimension. Each cuts what those before it left, from
// left to right; a strided shard comes after mesh dimensions to its right, as many as make up its
// split factor. So every rank holds one interval of every dimension, and only the mesh dimension
// that cut last can be changed by a collective along itself: all its ranks share what the others
// left.

/// Mesh dimensions that shard this tensor dimension, in the order in which they cut it.
std::vector<size_t> shard_order(const Placements& placements, c10::IntArrayRef mesh_shape,
                                int64_t tensor_dim);
/// The placement of a mesh dimension that cuts `tensor_dim` after all that already do.
Placement shard_last(const Placements& placements, c10::IntArrayRef mesh_shape, size_t mesh_dim,
                     int64_t tensor_dim);

/// The same placements with split factors that say just which mesh dimensions cut before: 1 if none
/// to the right does.
Placements canonical(const Placements& placements, c10::IntArrayRef mesh_shape);

/// What the rank at `coordinate` holds of a dimension of this size.
Chunk local_chunk(int64_t size, int64_t tensor_dim, const Placements& placements,
                  c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate);
/// The same of all dimensions.
std::vector<Chunk> local_box(c10::IntArrayRef sizes, const Placements& placements,
                             c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate);
Sizes local_sizes(c10::IntArrayRef sizes, const Placements& placements, c10::IntArrayRef mesh_shape,
                  c10::IntArrayRef coordinate);

/// Global sizes, if every rank's part is as large as this one.
Sizes global_sizes_of_even(c10::IntArrayRef part, const Placements& placements,
                           c10::IntArrayRef mesh_shape);

/// Whether all ranks hold equally much; whether each holds something.
bool is_even(c10::IntArrayRef sizes, const Placements& placements, c10::IntArrayRef mesh_shape);
bool has_empty_shard(c10::IntArrayRef sizes, const Placements& placements,
                     c10::IntArrayRef mesh_shape);

/// Strides of a dense tensor of these sizes whose dimensions lie in memory in the order that
/// `strides` gives.
Sizes dense_strides_like(c10::IntArrayRef sizes, c10::IntArrayRef strides);

/// All coordinates of a mesh of this shape, in row-major order.
std::vector<std::vector<int64_t>> coordinates_of(c10::IntArrayRef mesh_shape);

/// Whether all Partial placements are of one operation (an average is a sum): a maximum of sums is
/// not the sum of maxima, and placements do not say which is meant.
bool is_one_kind(const Placements& placements);

/// "Shard(-1)" of a tensor of `ndim` dimensions is "Shard(ndim - 1)"; throws if there is no such
/// dimension.
Placements normalize(const char* caller, Placements placements, int64_t ndim, int64_t mesh_ndim);

}  // namespace tessera::dtensor
