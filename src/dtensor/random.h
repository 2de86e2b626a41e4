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
// That needs equal generator states: each draw compares them. While they agree the default
// generator is used, as on one device. If they do not (ranks seeded differently, or threads of one
// process that share the generator), the mesh gets a generator of its own that starts with the
// state of its first rank's, and the ranks' own generators are left alone.

/// The generator for one draw on this mesh. Collective over it.
at::Generator shared_generator(const Spec& spec, c10::Device device);

/// This rank's part of what `draw` fills a tensor of these global sizes with.
at::Tensor draw_part(const Spec& spec, c10::IntArrayRef sizes, const at::TensorOptions& options,
                     const std::function<void(at::Tensor& whole)>& draw);

/// The part of a tensor that a rank of this spec holds: a view.
at::Tensor part_of_whole(const at::Tensor& whole, const Spec& spec);

}  // namespace tessera::dtensor
