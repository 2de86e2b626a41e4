#pragma once

#include "launcher/descriptor.h"

#include <string>

namespace tessera::launcher {

/// A TCP socket that already listens on a free port of this host. Rank 0 inherits it, so that
/// nobody can take the port between its choice and its use, and peers that connect early wait in
/// the queue.
struct StoreSocket {
  Descriptor listener;
  std::string address;  // "tcp://127.0.0.1:PORT"
};

StoreSocket listen_for_store();

}  // namespace tessera::launcher
