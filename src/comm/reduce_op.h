#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace tessera::comm {

/// "sum", "avg", ...: the spelling of `_c10d_functional`.
const char* name_of_reduce(c10d::ReduceOp::RedOpType op);

}  // namespace tessera::comm
