#include "comm/reduce_op.h"

#include <iterator>

namespace tessera::comm {

const char* name_of_reduce(c10d::ReduceOp::RedOpType op) {
  constexpr const char* kNames[] = {"sum",  "avg", "product", "min",       "max",
                                    "band", "bor", "bxor",    "premul_sum"};
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "unused";
}

}  // namespace tessera::comm
