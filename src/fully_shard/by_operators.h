#pragma once

#include <tessera/comm.h>

#include "fully_shard/rows.h"

#include <vector>

/// Gathers and reductions of a unit by operators, so that a recorder sees them: nothing is seen in
/// place or sent ahead. Compiled, they are as early and as few as its passes make them.
namespace tessera::sharded {

/// Whole tensors in `dtypes` of all ranks' shards.
std::vector<at::Tensor> gather_by_operators(const std::vector<at::Tensor>& shards,
                                            const std::vector<Rows>& rows,
                                            const std::vector<at::ScalarType>& dtypes,
                                            const Group& group);

/// This rank's parts of `tensors`, of one dtype, reduced over `group` and then over `copies`, if
/// there are any.
std::vector<at::Tensor> scatter_by_operators(const std::vector<at::Tensor>& tensors,
                                             const std::vector<Rows>& rows,
                                             ReduceOp::RedOpType reduction, const Group& group,
                                             const Group& copies);

}  // namespace tessera::sharded
