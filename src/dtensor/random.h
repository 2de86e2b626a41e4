#pragma once

#include "dtensor/spec.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>

/// Random numbers on which all ranks of a mesh agree. See Note [drawing the whole].
namespace tessera::dtensor {

// Note [drawing the whole]
// A distributed draw equals the one-device draw of the same seed, however it is placed. The CPU's
// generator can't be moved to an offset, so every rank draws the whole tensor and keeps its part.
// That needs equal generator states: each draw compares them. While they agree every rank uses its
// default generator, as on one device. If they do not (ranks seeded differently, or threads of one
// process that share the generator), all draw what the mesh's first rank would: from a copy of its
// generator, which goes on from there. The other ranks' generators are left alone.

/// The generator for one draw on a mesh. Making it is collective over the mesh.
class MeshGenerator {
 public:
  MeshGenerator(const Spec& spec, c10::Device device);
  ~MeshGenerator();
  MeshGenerator(const MeshGenerator&) = delete;
  MeshGenerator& operator=(const MeshGenerator&) = delete;

  const at::Generator& get() const { return used_; }

 private:
  at::Generator standard_;
  at::Generator used_;
  bool goes_on_ = false;  // the standard one takes over the state of the used one
};

/// Throws on all ranks alike unless their default generators are in one state. Collective.
void require_one_state(const std::string& caller, const Spec& spec, c10::Device device);

/// This rank's part of what `draw` fills a tensor of these global sizes with.
at::Tensor draw_part(const Spec& spec, c10::IntArrayRef sizes, const at::TensorOptions& options,
                     const std::function<void(at::Tensor& whole)>& draw);

/// The part of a tensor that a rank of this spec holds: a view.
at::Tensor part_of_whole(const at::Tensor& whole, const Spec& spec);

}  // namespace tessera::dtensor
