#pragma once

#include "comm/shm/medium.h"

#include <c10/core/Device.h>

namespace tessera::comm::shm {

// Note [slots on a device]
// A rank's slots on a GPU are memory of its own that peers open once through CUDA's handles between
// processes. Copies and sums run on the group's stream of the rank. What orders them between ranks
// is in two parts: the counters of Note [rounds] say that a peer has issued its work, and an event
// that the peer recorded behind that work, which the stream waits for, says that the device has
// done it. So the host waits for peers' hosts alone, no kernel waits for anything, and every wait
// of a stream is for work that was issued before it: a peer that ends, dies or is stopped later can
// leave no stream blocked. All that the counters do (call check, timeouts, dead and stopped ranks)
// holds as it does in host memory.

/// Whether this build and machine have it.
bool device_medium_available();

/// Either the slots on the device, or why ranks can't share its memory.
struct DeviceMediumResult {
  std::shared_ptr<Medium> medium;
  std::string problem;
};

/// Collective: every rank comes to it in the same place of the order of collectives. `pending` is
/// what it waits as. The answer is the same on all ranks.
DeviceMediumResult make_device_medium(Channel& channel, c10::Device device, const Pending& pending);

/// Throws if the current stream of the device is being captured into a graph.
void check_not_captured(const char* collective, c10::Device device);

/// What the host's kernels do, by operators of libtorch on the current stream: operands in their
/// order, half types accumulated in float32 and rounded once.
void combine_on_device(c10::Device device, const Combine& how, void* out,
                       const std::vector<const void*>& operands, size_t bytes);

}  // namespace tessera::comm::shm
