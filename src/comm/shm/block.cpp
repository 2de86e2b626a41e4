#include "comm/shm/block.h"

#include <algorithm>

namespace tessera::comm::shm {
namespace {

constexpr size_t kPage = 4096;
// All slots of a group together should stay in the last-level cache: the data is read back right
// after it is written.
constexpr size_t kGroupBytes = size_t{16} << 20;
constexpr size_t kLargestSlot = size_t{512} << 10;
// Two ranks pass chunks back and forth: small ones overlap best. More ranks usually share cores,
// and every chunk costs them a switch.
constexpr size_t kLargestSlotOfPair = size_t{128} << 10;
constexpr size_t kSmallestSlot = size_t{32} << 10;

size_t up_to_page(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

Layout::Layout(int ranks)
    : ranks(ranks),
      slot_bytes(std::clamp(kGroupBytes / kSlots / static_cast<size_t>(ranks) / kPage * kPage,
                            kSmallestSlot, ranks <= 2 ? kLargestSlotOfPair : kLargestSlot)),
      outboxes_at(up_to_page(sizeof(RankBlock))),
      slots_at(up_to_page(outboxes_at + static_cast<size_t>(ranks) * sizeof(Outbox))),
      total_bytes(slots_at + kSlots * slot_bytes) {}

}  // namespace tessera::comm::shm
