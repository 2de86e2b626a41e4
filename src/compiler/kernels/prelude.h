#pragma once

#include <c10/core/DeviceType.h>

#include <string>

namespace tessera::compiler {

/// The beginning of a generated source: what the target has, and those functions and types that
/// `kernels` use.
std::string prelude_for(const std::string& kernels, c10::DeviceType device);

}  // namespace tessera::compiler
