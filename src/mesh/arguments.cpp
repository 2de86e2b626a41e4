#include "mesh/arguments.h"

#include "mesh/layout.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::mesh {

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
