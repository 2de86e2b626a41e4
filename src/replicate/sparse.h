#pragma once

#include <tessera/comm.h>

namespace tessera::replication {

/// The average over the group of sparse gradients, coalesced. Every rank calls it; a dense one that
/// stands in for a missing gradient counts as empty.
at::Tensor average_sparse(const at::Tensor& gradient, const at::Tensor& parameter,
                          const Group& group);

}  // namespace tessera::replication
