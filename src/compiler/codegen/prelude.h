#pragma once

#include <string>

namespace tessera::compiler {

/// The beginning of a generated source: includes, the interface to the runtime, and those functions
/// and types that `kernels` use.
std::string prelude_for(const std::string& kernels);

}  // namespace tessera::compiler
