#pragma once

#include "comm/shm/block.h"

#include <atomic>

namespace tessera::comm::shm {

/// Where a test may stop or kill a rank. Null outside tests.
enum class Phase { Announced, Filled, Posted, Drained, Concluded };
extern std::atomic<void (*)(Phase, const Descriptor&)> phase_hook;
inline void reach(Phase phase, const Descriptor& descriptor) {
  if (auto* hook = phase_hook.load(std::memory_order_relaxed)) hook(phase, descriptor);
}

}  // namespace tessera::comm::shm
