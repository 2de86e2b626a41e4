#pragma once

#include "dtensor/spec.h"

#include <ATen/core/Tensor.h>

#include <string>

/// What ranks compare before they rely on each other's tensors. Collective over the mesh.
namespace tessera::dtensor {

/// Global sizes from those of all ranks' parts; throws on all ranks alike if these do not make up
/// one tensor by the chunk rule, or if dtypes differ. `wrong`: what this rank knows to be wrong
/// already, for all to throw.
Sizes agreed_sizes(const at::Tensor& local, const Spec& spec, std::string wrong = {});
/// The first rank's values wherever the placement says that all hold the same; without history.
at::Tensor agreed_values(const at::Tensor& local, const Spec& spec);
/// Throws on all ranks of the mesh alike if shape or dtype of a tensor that all hold, or the
/// placements or source they give, differ.
void check_same(const char* caller, const at::Tensor& tensor, const Spec& spec, int source);

}  // namespace tessera::dtensor
