#include "comm/dtype_names.h"

#include "base/text.h"

namespace tessera::comm {

std::string name_of_dtype(c10::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

std::string describe_elements(c10::ScalarType dtype, size_t bytes) {
  return std::to_string(bytes / c10::elementSize(dtype)) + " " + name_of_dtype(dtype) + ", " +
         format_bytes(bytes);
}

}  // namespace tessera::comm
