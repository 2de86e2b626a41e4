#pragma once

#include "dtensor/spec.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>

/// Random numbers on which all ranks of a mesh agree. See Note [drawing the whole].
namespace tessera::dtensor {

// Note [drawing the whole]
// A distributed draw equals the one-device draw of the same seed, however it is placed. Which
// number an element gets depends on the whole tensor: the CPU's generator can't be moved to an
// offset, and a GPU's kernels deal numbers out by their launch geometry, vector width and memory
// order. So every rank draws the whole tensor, laid out as on one device, and keeps its part. That
// needs equal generator states: each draw compares them. While they agree every rank uses its
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
  /// Runs an operator that takes no generator: the default one stands in for this one.
  void run_as_default(const std::function<void()>& draw) const;

 private:
  at::Generator standard_;
  at::Generator used_;
  bool goes_on_ = false;  // the standard one takes over the state of the used one
};

/// Throws on all ranks alike unless their default generators are in one state. Collective.
void require_one_state(const std::string& caller, const Spec& spec, c10::Device device);

/// Memory for a whole tensor of these sizes, its dimensions in the order of the strides.
at::Tensor empty_global(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                        const at::TensorOptions& options);

/// This rank's part of what `draw` fills the whole with.
at::Tensor draw_part(const Spec& spec, at::Tensor whole,
                     const std::function<void(at::Tensor& whole)>& draw);

/// The part of a tensor that a rank of this spec holds: a view.
at::Tensor local_part_of(const at::Tensor& whole, const Spec& spec);

}  // namespace tessera::dtensor
