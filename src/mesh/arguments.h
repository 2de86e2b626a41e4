#pragma once

#include <cstdint>
#include <string>
#include <vector>

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
