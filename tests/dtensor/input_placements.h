#pragma once

#include <tessera/dtensor.h>

#include <random>
#include <vector>

/// How the inputs of a call are placed when rules are tried.
namespace tessera::brute_force {

/// Which placements an input may have.
enum class Range {
  Common,  // Replicate, Shard, Partial(sum): few enough to try all
  Wide,    // the other reductions of parts and strided shards as well: drawn
};

/// By attempt, then by input. Wide: `share` of 40 draws, at least one. Common: all of them if
/// `share` is 1 and the mesh has one dimension or there are at most two inputs, else `share` of 200
/// draws, at least two.
std::vector<std::vector<Placements>> placements_to_try(const std::vector<at::Tensor>& inputs,
                                                       const std::vector<int64_t>& mesh_shape,
                                                       Range range, double share,
                                                       std::mt19937_64& random);

/// This rank's part of a whole tensor. Those of a Partial differ from rank to rank, stay on the
/// same side of zero, and of Partial(max) and Partial(min) every rank has some that count.
at::Tensor part_for(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements);

}  // namespace tessera::brute_force
