#pragma once

#include <tessera/comm.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace tessera::comm {

/// Memory that all ranks of a group map, freed when the last of them lets go of it, and gates at
/// which they wait for each other: whoever writes and whoever reads agree on them.
class GroupMemory {
 public:
  enum class Gate { Written, Read };
  static constexpr int kGates = 2;

  virtual ~GroupMemory() = default;
  virtual uint8_t* address() const = 0;
  virtual size_t bytes() const = 0;

  /// This rank has come to the gate once more. Returns at once.
  virtual void arrive(Gate gate) = 0;
  /// Returns when every rank has come to the gate as often as this one; at most the group's
  /// timeout.
  virtual void await(Gate gate) = 0;
};

/// Every rank of the group calls it. Null if they can't share memory: the group's backend for CPU
/// tensors is not shm. `purpose` appears in errors.
std::shared_ptr<GroupMemory> make_group_memory(const Group& group, size_t bytes,
                                               const std::string& purpose);

}  // namespace tessera::comm

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
