#pragma once

#include "comm/shm/channel.h"

#include <vector>

namespace tessera::comm::shm {

/// Publishes this rank's block in the group's store and maps everybody else's. Blocks until all
/// have published, at most request.timeout; the error then names the missing ranks.
std::vector<Member> join(const BackendRequest& request, Arena& arena, size_t block_offset,
                         const Layout& layout);

}  // namespace tessera::comm::shm
