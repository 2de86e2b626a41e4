#include "comm/type_names.h"

#include "base/text.h"

#include <iterator>

namespace tessera::comm {

std::string name_of_dtype(c10::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

std::string describe_elements(c10::ScalarType dtype, size_t bytes) {
  return std::to_string(bytes / c10::elementSize(dtype)) + " " + name_of_dtype(dtype) + ", " +
         format_bytes(bytes);
}

const char* name_of_reduce(c10d::ReduceOp::RedOpType op) {
  constexpr const char* kNames[] = {"sum",  "avg", "product", "min",       "max",
                                    "band", "bor", "bxor",    "premul_sum"};
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "unused";
}

}  // namespace tessera::comm
