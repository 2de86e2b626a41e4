#pragma once

#include "comm/call_check.h"
#include "comm/shm/shared_memory.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

/// The layout of shared memory. Every rank of a group owns one RankBlock in its arena, followed by
/// its outboxes and its slots; it alone writes to it, except for the fields marked as written by
/// others.
namespace tessera::comm::shm {

inline constexpr int kMaxRanks = 64;
inline constexpr uint64_t kSlots = 8;        // rounds a rank may be ahead of the slowest reader
inline constexpr uint64_t kDescriptors = 8;  // collectives a rank may be ahead of the slowest peer
inline constexpr uint64_t kDescriptorRing =
    2 * kDescriptors;  // so that those of peers that are ahead stay readable
inline constexpr size_t kFlightEntries = 32;
inline constexpr size_t kP2PEntries = 16;  // messages under way from one rank to another
inline constexpr size_t kReasonBytes = 1024;
inline constexpr uint64_t kDeviceSlots = 4;  // of a rank on a GPU
inline constexpr size_t kDeviceHandleBytes = 64;
inline constexpr uint32_t kLayoutVersion = 4;

/// A number that one thread may print while another writes it.
template <class T>
class Relaxed {
 public:
  operator T() const { return value_.load(std::memory_order_relaxed); }
  void operator=(T value) { value_.store(value, std::memory_order_relaxed); }

 private:
  std::atomic<T> value_;
};

/// One line of the record of recent collectives.
struct FlightEntry {
  enum State : uint32_t { Empty, Queued, Running, Done, Failed };
  std::atomic<uint32_t> state;
  Relaxed<Kind> kind;
  Relaxed<int32_t> dtype;
  Relaxed<int32_t> reduce;
  Relaxed<int32_t> peer;  // root, source or destination; -1 if none
  Relaxed<uint64_t> sequence;
  Relaxed<uint64_t> bytes;
  Relaxed<int64_t> queued_ns;
  Relaxed<int64_t> started_ns;
  Relaxed<int64_t> ended_ns;
};

enum class Health : uint32_t { Alive, Left, Failed };
/// Whom the reason of a failure is about: the rank that failed, so that others have to name it; a
/// peer, so that it holds for whoever hears it; or all, told alike by everybody.
enum class About : uint32_t { Self, Peer, All };

/// How peers reach this rank's slots on a GPU, Note [slots on a device]: by handles, or by address
/// in the same process.
struct DeviceHandles {
  using Handle = std::array<char, kDeviceHandleBytes>;
  std::atomic<uint64_t> stage;  // how far this rank has come in sharing them
  Handle memory;
  std::array<Handle, kDeviceSlots> filled;
  std::array<Handle, kDeviceSlots> read;
  uintptr_t memory_here;
  std::array<uintptr_t, kDeviceSlots> filled_here;
  std::array<uintptr_t, kDeviceSlots> read_here;
  std::array<char, 256> problem;  // why it can't share them; written before `stage`
};

struct alignas(64) RankBlock {
  uint32_t layout_version;
  int32_t pid;

  // One line for what peers wait for at the start of a collective, one for its end: two transfers
  // per small one.
  alignas(64) std::atomic<uint64_t> started;  // sequence number of the newest descriptor
  std::atomic<uint64_t> posted;               // rounds whose slot may be read
  std::atomic<int32_t>
      core;  // where the rank last wrote from: no use to spin for it on the same one
  alignas(64)
      std::atomic<uint64_t> consumed;  // rounds in which this rank reads no slot of a peer any more
  std::atomic<uint64_t> finished;      // collectives this rank has completed

  alignas(64) Bell bell;  // rung by the owner after any change above; sleepers are peers
  alignas(64)
      Bell p2p_bell;  // rung by peers that sent to or took from the owner; the owner sleeps on it
  alignas(64) std::atomic<Health> health;
  std::array<char, kReasonBytes> reason;  // why it failed; written before `health`
  About about;                            // likewise
  std::atomic<uint64_t>
      departed;  // bit per peer that will never look at this block again; written by peers

  std::array<Descriptor, kDescriptorRing> descriptors;
  std::array<Descriptor, kDescriptorRing> gate_calls;  // likewise, by `gates`
  std::atomic<uint64_t> gates;  // how often it has come to any gate `Written` of the group's memory
  std::array<FlightEntry, kFlightEntries> flight;
  std::atomic<uint64_t> flight_count;
  DeviceHandles device;
};

/// A message from the block's owner to one peer.
struct alignas(64) P2PEntry {
  enum State : uint32_t { Free, Full, Taken };
  std::atomic<uint32_t> state;  // Free -> Full by the sender, Full -> Taken by the receiver, Taken
                                // -> Free by the sender
  int32_t tag;
  int32_t dtype;
  uint64_t number;  // order of sending, from 1
  uint64_t bytes;
  uint64_t offset;       // in the sender's arena
  uint32_t is_buffered;  // the memory belongs to the message, not to a tensor
};
using Outbox = std::array<P2PEntry, kP2PEntries>;

/// Sizes that depend on the number of ranks. Equal on all ranks of a group.
struct Layout {
  explicit Layout(int ranks);
  int ranks;
  size_t slot_bytes;
  size_t outboxes_at;
  size_t slots_at;
  size_t total_bytes;
};

}  // namespace tessera::comm::shm
