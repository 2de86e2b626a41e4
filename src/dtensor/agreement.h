#pragma once

#include "dtensor/spec.h"

#include <ATen/core/Tensor.h>

/// What DTensor::from_local compares if it is asked to. Collective over the mesh.
namespace tessera::dtensor {

/// Global sizes from those of all ranks' parts; throws on all ranks alike if these do not make up
/// one tensor by the chunk rule, or if dtypes differ.
Sizes agreed_sizes(const at::Tensor& local, const Spec& spec);
/// The first rank's tensor wherever the placement says that all hold the same. Differentiable: the
/// gradient stays with each rank's own.
at::Tensor agreed_values(const at::Tensor& local, const Spec& spec);

}  // namespace tessera::dtensor
