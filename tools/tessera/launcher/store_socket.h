#pragma once

#include "launcher/descriptor.h"

#include <string>

namespace tessera::launcher {

/// A socket of this host alone that already listens, under a name of the kernel's choice that no
/// file stands for. Rank 0 inherits it, so that nobody can take the name between its choice and its
/// use, and peers that connect early wait in the queue.
struct StoreSocket {
  Descriptor listener;
  std::string address;  // "unix://@NAME"
};

StoreSocket listen_for_store();

}  // namespace tessera::launcher
