#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

/// Parameters whose rows are in the order of ranks. See Note [packed rows].
namespace tessera::parallel {

// Note [packed rows]
// The rows of a fused query-key-value weight are q, then k, then v. Cut into chunks, a rank would
// get rows of one of them. So they are put into another order before they are cut: the rank's rows
// of q, of k and of v, then the next rank's. Each chunk is then a small fused weight, and code that
// splits its output in three works unchanged. The order depends on the number of ranks and can't be
// told from the tensor, so the tensor is remembered as packed (dtensor/packed_rows.h): another
// module that shares it must want the same, and load_state_dict wants to be told.

/// Reorders a plain parameter, and its gradient, in place and remembers it.
void pack_parameter(const at::Tensor& parameter, int64_t packed, int64_t ranks);

}  // namespace tessera::parallel
