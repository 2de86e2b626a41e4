#pragma once

#include "comm/group_memory.h"

#include <optional>
#include <string>

/// Which tensors are this rank's equal part of a whole that lies in memory of a group, so that
/// whoever would gather them can see the whole in place.
namespace tessera::comm {

struct SharedPart {
  std::shared_ptr<GroupMemory> memory;  // at whose gates readers and writers meet
  std::string group;                    // its name
  uint8_t* whole;
  size_t bytes;  // of the whole
};

/// Says so of a part that begins at `address`, while the result lives.
std::shared_ptr<void> declare_shared_part(const void* address, SharedPart part);
std::optional<SharedPart> find_shared_part(const void* address);

}  // namespace tessera::comm
