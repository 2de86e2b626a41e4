#pragma once

#include <string>

namespace tessera::comm {

/// Equal for processes that can map each other's memory: one boot of a kernel, one PID namespace,
/// one user.
std::string host_identity();
/// Equal for processes that reach each other by the loopback device, on one host.
std::string network_identity();
/// For messages.
std::string host_name();

}  // namespace tessera::comm
