#pragma once

#include <tessera/comm.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::compiler {

/// How much of a dimension of this size each rank has by DTensor's chunk rule.
std::vector<int64_t> chunk_lengths(int64_t size, int64_t ranks);

/// The ranks' parts of a dimension, which lie one after another, cut otherwise: `from` and `to` are
/// their lengths, by rank. Collective, in operators that are recorded.
at::Tensor move_rows(const at::Tensor& local, int64_t tensor_dim, const std::vector<int64_t>& from,
                     const std::vector<int64_t>& to, const Group& group);

}  // namespace tessera::compiler
