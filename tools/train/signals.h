#pragma once

namespace tessera::train {

/// From now on SIGINT and SIGTERM are noted instead of ending the process; a second SIGINT ends it.
void note_signals();
/// The signal that came; 0 if none has.
int noted_signal();

}  // namespace tessera::train
