#pragma once

namespace tessera::comm {

/// From now on `signal` makes this process write its recent collectives to standard error. 0, or a
/// signal the program handles itself: nothing. The handler only wakes a thread that does the
/// writing.
void dump_on_signal(int signal);

}  // namespace tessera::comm
