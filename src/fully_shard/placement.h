#pragma once

#include "dtensor/spec.h"

#include <ATen/core/Tensor.h>

namespace tessera::sharded {

/// How a parameter is placed outside of computation: its first dimension over the last dimension of
/// `mesh`, copies over one before it; a tensor parallel one on the mesh that has the dimensions of
/// both. `is_split`: false if every rank keeps all of it.
dtensor::SpecPtr outside_spec(const at::Tensor& parameter, const std::string& name,
                              const DeviceMesh& mesh, bool is_split);

}  // namespace tessera::sharded
