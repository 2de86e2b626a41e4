#pragma once

#include <tessera/mesh.h>

#include "dtensor/sharding.h"

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::dtensor {

/// A mesh and placements on it, with what calls need of them at hand. One object per pair (see
/// make_spec), so that the id stands for both.
struct Spec final : c10::intrusive_ptr_target {
  Spec(DeviceMesh mesh, Placements placements, uint64_t id);

  const DeviceMesh mesh;
  const Placements placements;
  const uint64_t id;  // never used again
  const std::vector<int64_t> mesh_shape;
  const bool is_member;                   // this rank is in the mesh
  const std::vector<int64_t> coordinate;  // empty outside of the mesh
  const std::vector<Group> groups;        // by mesh dimension; empty outside of the mesh
  const bool has_partial;
  const bool is_replicated;  // on every mesh dimension of more than one rank

  Sizes local_sizes(c10::IntArrayRef sizes) const;
};
using SpecPtr = c10::intrusive_ptr<Spec>;

/// The spec of this rank for the pair; placements have been normalized.
SpecPtr make_spec(const DeviceMesh& mesh, const Placements& placements);
/// On the same mesh: Replicate everywhere; Replicate where it is Partial.
SpecPtr replicated(const Spec& spec);
SpecPtr without_partial(const SpecPtr& spec);

/// Throws a ValueError if they are on different meshes.
void check_one_mesh(const std::string& caller, const Spec& left, const Spec& right);

}  // namespace tessera::dtensor
