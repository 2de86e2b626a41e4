#pragma once

#include <sched.h>

namespace tessera::testing {

/// This process uses so many cores from here on, on every machine: two ranks on two have none to
/// spare.
inline void keep_to_cores(int count) {
  cpu_set_t usable, kept;
  CPU_ZERO(&kept);
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return;
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&kept) < count; ++core) {
    if (CPU_ISSET(core, &usable)) CPU_SET(core, &kept);
  }
  sched_setaffinity(0, sizeof(kept), &kept);
}

}  // namespace tessera::testing
