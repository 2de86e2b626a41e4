#pragma once

#include <cstdint>

namespace tessera::train {

/// The first signal that asked this process to end.
struct NotedSignal {
  int number = 0;      // 0: none has come
  double when = 0;     // seconds since 1970
  int64_t sender = 0;  // the process that sent it; 0: the launcher did, or a terminal
};

/// From now on SIGINT, SIGTERM and SIGHUP (unless it is ignored, as under nohup) are noted instead
/// of ending the process; a second SIGINT ends it.
void note_signals();
NotedSignal noted_signal();

/// "SIGTERM".
const char* signal_name(int number);

}  // namespace tessera::train
