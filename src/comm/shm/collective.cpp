#include "comm/shm/collective.h"

#include <c10/util/Exception.h>

namespace tessera::comm::shm {
namespace {

// Below this a copy is cheaper than waiting until the peers have read the original.
constexpr size_t kLeastOffered = size_t{64} << 10;

}  // namespace

void Collective::start(Channel& channel) {
  channel.enter(descriptor_, timeout);
  channel.announce(descriptor_);
  has_started_ = true;
  begin(channel);
}

void Collective::finish(Channel& channel) {
  channel.enter(descriptor_, timeout);
  if (!has_started_) start(channel);
  complete(channel);
  channel.conclude();
}

std::vector<int> all_but(int rank, int size) {
  std::vector<int> others;
  // From the next rank on, so that not everybody reads the same slot at the same time.
  for (int step = 1; step < size; ++step) others.push_back((rank + step) % size);
  return others;
}

void RoundsCollective::offer(const void* data, size_t bytes, size_t one_round) {
  const bool is_large = bytes > one_round && bytes >= kLeastOffered;
  const auto offset = is_large ? medium_.offset_of(data, bytes) : std::nullopt;
  descriptor_.shared_offset = offset ? static_cast<int64_t>(*offset) : -1;
}

const uint8_t* RoundsCollective::read(Channel& channel, int peer, uint64_t round,
                                      size_t displacement, size_t in_slot) {
  const auto& theirs = channel.descriptor_of(peer, descriptor_.sequence);
  if (theirs.shared_offset < 0) return medium_.peer_slot(peer, round) + in_slot;
  channel.await_posted(peer, round + 1);
  return channel.member(peer).arena_base + theirs.shared_offset + displacement;
}

bool RoundsCollective::starts_at_once(const Channel& channel) const {
  return medium_.starts_at_issue() && !needs_peers_for_rounds_ && count_rounds(channel) <= 1;
}

void RoundsCollective::take(Channel& channel) {
  rounds_ = count_rounds(channel);
  first_ = channel.take_rounds(rounds_);
  if (!fills_ || is_offered()) {
    filled_ = rounds_;
    if (rounds_ > 0) medium_.post_through(first_ + rounds_);
  }
}

void RoundsCollective::fill_next() {
  fill(filled_, medium_.slot(first_ + filled_));
  ++filled_;
  medium_.post_through(first_ + filled_);
}

void RoundsCollective::begin(Channel& channel) {
  if (!starts_at_once(channel)) return;
  take(channel);
  if (filled_ < rounds_) fill_next();
}

void RoundsCollective::drain_next(Channel& channel) {
  drain(channel, drained_, first_ + drained_);
  ++drained_;
  // Before the last word to the owners: until then they must not change what was read by address.
  for (size_t i = 0; i < sources_.size() && drained_ == rounds_; ++i) {
    const bool by_address =
        channel.descriptor_of(sources_[i], descriptor_.sequence).shared_offset >= 0;
    if (by_address) channel.check_kept(sources_[i]);
  }
  medium_.consume_through(first_ + drained_);
}

void RoundsCollective::complete(Channel& channel) {
  for (const int source : sources_) channel.meet(source);
  // Who reads nothing waits as well: two roots would never hear of each other.
  for (int step = 1; step < channel.size() && channel.checks_calls(); ++step)
    channel.meet((channel.rank() + step) % channel.size());
  check_sources(channel);
  if (!starts_at_once(channel)) take(channel);
  // A rank that reads nothing must not hold up the slots of those that do.
  if (sources_.empty()) medium_.consume_through(first_ + rounds_);
  move_own_part();
  const uint64_t ahead = medium_.rounds_ahead();
  while (filled_ < rounds_ || (!sources_.empty() && drained_ < rounds_)) {
    const bool may_fill = filled_ < rounds_ && (sources_.empty() || filled_ - drained_ < ahead);
    may_fill ? fill_next() : drain_next(channel);
  }
  // The caller may write to its tensor again after this.
  if (is_offered()) channel.await_readers(first_ + rounds_);
}

}  // namespace tessera::comm::shm
