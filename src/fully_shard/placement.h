#pragma once

#include "dtensor/spec.h"

#include <ATen/core/Tensor.h>

namespace tessera::sharded {

/// How a parameter is placed outside of computation: one of its dimensions over the last dimension
/// of `mesh`, copies over one before it; a tensor parallel one on the mesh that has the dimensions
/// of both. `shard_dim`: none if every rank keeps all of it.
dtensor::SpecPtr outside_spec(const at::Tensor& parameter, const std::string& name,
                              const DeviceMesh& mesh, std::optional<int64_t> shard_dim);

}  // namespace tessera::sharded
