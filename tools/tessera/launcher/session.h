#pragma once

#include "launcher/orphans.h"
#include "launcher/output.h"
#include "launcher/signal_inbox.h"
#include "launcher/watcher.h"

#include <chrono>

namespace tessera::launcher {

/// What outlives one start of the job, and is made in this order before the first.
struct Session {
  Session() { orphans.exclude(watcher.pid()); }

  SignalInbox signals;
  Output output;
  Orphans orphans;
  Watcher watcher;

  /// Waits until all that was said has been written. A signal that ends the job ends the wait and
  /// is returned; otherwise 0.
  int flush();
  /// Does nothing but write for so long. A signal that ends the job ends it and is returned;
  /// otherwise 0.
  int pause(std::chrono::duration<double> time);
};

}  // namespace tessera::launcher
