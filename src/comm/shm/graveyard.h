#pragma once

#include "comm/shm/channel.h"

#include <memory>
#include <vector>

namespace tessera::comm::shm {

/// Takes over the block of a channel that has left its group and frees it once no peer can read it
/// any more: each has left too, or its process has ended; with it what else they could reach
/// (`kept`). Looks whenever a channel is buried; what is left at exit the kernel frees.
void bury(std::shared_ptr<Arena> arena, size_t block_offset, int rank, std::vector<Member> members,
          std::vector<std::shared_ptr<void>> kept);

}  // namespace tessera::comm::shm
