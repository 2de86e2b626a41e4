#pragma once

#include <string>

namespace tessera::comm {

/// Equal for processes that can map each other's memory: one boot of a kernel, one PID namespace,
/// one user.
std::string host_identity();

}  // namespace tessera::comm
