#include "comm/shm/medium.h"

#include "comm/shm/copy.h"

#include <algorithm>

namespace tessera::comm::shm {
namespace {

// Two chunks under way keep both ranks busy and the data in the second-level cache. With more ranks
// than cores the others are asleep anyway: then run ahead as far as the slots allow before giving
// up the core.
constexpr uint64_t kChunksAhead = 2;

// Up to here every rank reads every slot itself: one round instead of two, at the price of reading
// it all.
constexpr size_t kDirectBytes = size_t{128} << 10;

}  // namespace

uint64_t HostMedium::rounds_ahead() const {
  return channel_.is_oversubscribed() ? kSlots - 1 : kChunksAhead;
}

size_t HostMedium::most_direct() const {
  const auto ranks = static_cast<size_t>(channel_.size());
  return ranks <= 2 ? slot_bytes() : std::min(slot_bytes(), kDirectBytes / ranks);
}

void HostMedium::copy(uint8_t* to, const uint8_t* from, size_t bytes, Fate fate) {
  if (bytes == 0 || to == from) return;
  switch (fate) {
    case Fate::ReadSoon:
      return copy_to_cache(to, from, bytes);
    case Fate::ReadByPeers:
      return copy_for_peers(to, from, bytes);
    case Fate::NotReadSoon:
      return copy_past_cache(to, from, bytes);
  }
}

void HostMedium::combine(const Combine& how, uint8_t* out, const std::vector<const void*>& operands,
                         size_t bytes) {
  how.kernel(out, operands.data(), static_cast<int>(operands.size()), bytes / how.element_size);
}

std::optional<size_t> HostMedium::offset_of(const void* data, size_t bytes) const {
  return Arena::own()->offset_of(data, bytes);
}

}  // namespace tessera::comm::shm
