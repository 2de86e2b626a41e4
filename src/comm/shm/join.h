#pragma once

#include <vector>

#include "comm/shm/channel.h"

namespace tessera::comm::shm {

/// Publishes this rank's block in the group's store and maps everybody else's. Blocks until all have published, at most
/// request.timeout; the error then names the missing ranks.
std::vector<Member> join(const BackendRequest& request, Arena& arena, size_t block_offset, const Layout& layout);

/// Identifies the kernel and process namespace: ranks with equal ones can map each other's memory.
std::string host_identity();

}  // namespace tessera::comm::shm
