#pragma once

#include "dtensor/part.h"
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

struct RedistributePath {
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
RedistributePath find_path(const Layout& layout, const Placements& from, const Placements& to);

/// Moves a part from placements to placements. `path` leads from `from.placements`; `sizes` are
/// global. The result may share memory with `local`.
at::Tensor run_path(const RedistributePath& path, at::Tensor local, const Spec& from,
                    c10::IntArrayRef sizes);
/// The same, but returns when the last collective is under way; the function waits for it.
std::function<at::Tensor()> start_path(const RedistributePath& path, const at::Tensor& local,
                                       const Spec& from, c10::IntArrayRef sizes);

/// The cheapest way; throws, naming `caller`, if there is none.
RedistributePath require_path(const char* caller, const Spec& from, const Spec& to,
                              c10::IntArrayRef sizes, int64_t item_bytes);

/// A distributed tensor placed otherwise, without autograd; itself if nothing changes.
at::Tensor redistributed(const char* caller, const at::Tensor& tensor, const SpecPtr& to);

/// This rank's part of a parameter's gradient, undefined if there is none. The gradient of a
/// distributed parameter comes to be placed as the parameter is: a collective of its mesh if it was
/// not, which its ranks reach in one order.
at::Tensor local_gradient(const char* caller, const at::Tensor& parameter);

/// A gradient for `parameter` of which `part` is this rank's; shares its memory.
at::Tensor gradient_of_part(const at::Tensor& parameter, at::Tensor part);

}  // namespace tessera::dtensor
