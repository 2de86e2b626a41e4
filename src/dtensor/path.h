#pragma once

#include "dtensor/sharding.h"

#include <memory>
#include <vector>

/// From placements to placements by the cheapest way.
namespace tessera::dtensor {

/// One mesh dimension changes its placement, by one collective or none.
struct Step {
  size_t mesh_dim;
  Placement from;
  Placement to;
};

struct Path {
  std::vector<Step> steps;
  double cost = 0;  // bytes that travel, and a charge for each collective; infinite: no way
};

/// What a way starts from.
struct Layout {
  c10::IntArrayRef sizes;  // global
  int64_t item_bytes;
  c10::IntArrayRef mesh_shape;
};

/// Whether zeros add nothing to this Partial: then a shard becomes a summand, and nothing is sent.
bool fills_with_zeros(const Placement& placement);

/// The cheapest way: a shortest path over placements, whose edges are single collectives along one
/// mesh dimension (see Note [order of sharding] for which there are). A tensor becomes Partial only
/// if `to` is.
Path find_path(const Layout& layout, const Placements& from, const Placements& to);

}  // namespace tessera::dtensor
