// Collectives that combine what the ranks contribute. Operands are always combined in rank order,
// on whichever rank it happens, so every rank gets the same bits.
#include "comm/shm/collective.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tessera::comm::shm {

/// Note [large all-reduce]. Three ways, chosen alike on every rank once all descriptors are known:
/// - two ranks: each puts its chunk into a slot and combines the other's with its own; both do the
///   whole sum, but one round suffices and the chunk is still in the cache when it is written;
/// - more ranks: each combines one part of every chunk and puts the result into a slot of the next
///   round, from where all copy it: 1/n of the arithmetic for one more round;
/// - all tensors in shared memory: as before, but parts are read from and left in the tensors
///   themselves. Part r of a chunk is touched by rank r alone until it says that the result is
///   there, so working in place is safe.
class AllReduceLarge final : public Collective {
 public:
  AllReduceLarge(const Place& place, const Descriptor& descriptor, Bytes data, Combine combine);
  bool starts_at_once(const Channel&) const override { return false; }

 protected:
  void begin(Channel&) override {}
  void complete(Channel& channel) override;

 private:
  struct Part {
    size_t begin;
    size_t bytes;
  };
  Part part(uint64_t chunk, int rank) const;
  size_t at(uint64_t chunk) const { return chunk * chunk_bytes_; }
  size_t length(uint64_t chunk) const;

  bool all_share(Channel& channel) const;
  void exchange_whole(Channel& channel);
  void exchange_parts(Channel& channel);
  void work_in_place(Channel& channel);
  void combine_into(uint8_t* out, size_t bytes);

  int rank_;
  int size_;
  Bytes data_;
  Combine combine_;
  size_t chunk_bytes_;
  uint64_t chunks_;
  std::vector<int> peers_;
  std::vector<const void*> operands_;  // by rank
};

namespace {

constexpr size_t kInPlaceSlots = 4;
constexpr size_t kSmallestChunk = size_t{128} << 10;
constexpr size_t kLeastChunks = 8;  // enough of them to overlap one's sum with another's copy

}  // namespace

AllReduceLarge::AllReduceLarge(const Place& place, const Descriptor& descriptor, Bytes data,
                               Combine combine)
    : Collective(place.medium, descriptor),
      rank_(place.channel.rank()),
      size_(place.channel.size()),
      data_(data),
      combine_(combine),
      chunk_bytes_(std::min(place.medium.slot_bytes(),
                            std::max(kSmallestChunk, data.size / kLeastChunks / 4096 * 4096))),
      chunks_(divide_up(data.size, chunk_bytes_)),
      peers_(all_but(rank_, size_)),
      operands_(size_) {
  descriptor_.bytes = data.size;
  const auto offset = medium_.offset_of(data.data, data.size);
  descriptor_.shared_offset = offset ? static_cast<int64_t>(*offset) : -1;
}

size_t AllReduceLarge::length(uint64_t chunk) const {
  return std::min(chunk_bytes_, data_.size - at(chunk));
}

AllReduceLarge::Part AllReduceLarge::part(uint64_t chunk, int rank) const {
  // Whole cache lines, so that no two ranks write to one; a multiple of every element's size.
  const size_t step = divide_up(divide_up(length(chunk), size_), 64) * 64;
  const size_t begin = std::min(step * rank, length(chunk));
  return {.begin = begin, .bytes = std::min(step, length(chunk) - begin)};
}

bool AllReduceLarge::all_share(Channel& channel) const {
  return descriptor_.shared_offset >= 0 && std::all_of(peers_.begin(), peers_.end(), [&](int peer) {
           return channel.descriptor_of(peer, descriptor_.sequence).shared_offset >= 0;
         });
}

void AllReduceLarge::combine_into(uint8_t* out, size_t bytes) {
  medium_.combine(combine_, out, operands_, bytes);
}

void AllReduceLarge::complete(Channel& channel) {
  for (const int peer : peers_) channel.meet(peer);
  if (all_share(channel)) {
    work_in_place(channel);
  } else if (size_ == 2) {
    exchange_whole(channel);
  } else {
    exchange_parts(channel);
  }
}

void AllReduceLarge::exchange_whole(Channel& channel) {
  const uint64_t first = channel.take_rounds(chunks_);
  const int peer = peers_[0];
  for (uint64_t step = 0; step <= chunks_; ++step) {
    if (step < chunks_) {
      medium_.copy(medium_.slot(first + step), data_.data + at(step), length(step),
                   CopyHint::ReadByPeers);
      medium_.post_through(first + step + 1);
    }
    if (step == 0) continue;
    const uint64_t chunk = step - 1;
    operands_[peer] = medium_.peer_slot(peer, first + chunk);
    operands_[rank_] = data_.data + at(chunk);
    combine_into(data_.data + at(chunk), length(chunk));
    medium_.consume_through(first + chunk + 1);
  }
}

// In step s a rank posts chunk s, then combines its part of chunk s-1, then collects chunk s-2: two
// rounds per step, 2s for the chunk and 2s+1 for the results of the one before.
void AllReduceLarge::exchange_parts(Channel& channel) {
  const uint64_t steps = chunks_ + 2;
  const uint64_t first = channel.take_rounds(2 * steps);
  for (uint64_t step = 0; step < steps; ++step) {
    const uint64_t chunk_round = first + 2 * step;
    if (step < chunks_)
      medium_.copy(medium_.slot(chunk_round), data_.data + at(step), length(step),
                   CopyHint::ReadByPeers);
    medium_.post_through(chunk_round + 1);
    if (step >= 1 && step <= chunks_) {
      const auto own = part(step - 1, rank_);
      for (const int peer : peers_)
        operands_[peer] = medium_.peer_slot(peer, chunk_round - 2) + own.begin;
      operands_[rank_] = medium_.peer_slot(rank_, chunk_round - 2) + own.begin;
      auto* result = medium_.slot(chunk_round + 1);
      combine_into(result, own.bytes);
      medium_.copy(data_.data + at(step - 1) + own.begin, result, own.bytes, CopyHint::NotReadSoon);
    }
    medium_.post_through(chunk_round + 2);
    if (step >= 2) {
      for (const int peer : peers_) {
        const auto theirs = part(step - 2, peer);
        const auto* result = medium_.peer_slot(peer, chunk_round - 1);
        medium_.copy(data_.data + at(step - 2) + theirs.begin, result, theirs.bytes,
                     CopyHint::NotReadSoon);
      }
    }
    // Read so far: chunks before this step's and results before the previous step's round.
    medium_.consume_through(chunk_round);
  }
  medium_.consume_through(first + 2 * steps);
}

void AllReduceLarge::work_in_place(Channel& channel) {
  chunk_bytes_ = std::max(
      chunk_bytes_,
      kInPlaceSlots *
          kSmallestChunk);  // nothing goes through the slots: larger chunks, fewer meetings
  chunks_ = divide_up(data_.size, chunk_bytes_);
  const uint64_t first = channel.take_rounds(chunks_ + 1);
  medium_.post_through(first + 1);  // the tensor is ready to be read
  std::vector<uint8_t*> tensors(size_);
  for (const int peer : peers_) {
    channel.await_posted(peer, first + 1);
    tensors[peer] = channel.member(peer).arena_base +
                    channel.descriptor_of(peer, descriptor_.sequence).shared_offset;
  }
  tensors[rank_] = data_.data;
  for (uint64_t step = 0; step <= chunks_; ++step) {
    if (step < chunks_) {
      const auto own = part(step, rank_);
      for (int rank = 0; rank < size_; ++rank)
        operands_[rank] = tensors[rank] + at(step) + own.begin;
      combine_into(data_.data + at(step) + own.begin, own.bytes);
      medium_.post_through(first + step + 2);
    }
    if (step == 0) continue;
    for (const int peer : peers_) {
      const auto theirs = part(step - 1, peer);
      channel.await_posted(peer, first + step + 1);
      const size_t begin = at(step - 1) + theirs.begin;
      medium_.copy(data_.data + begin, tensors[peer] + begin, theirs.bytes, CopyHint::NotReadSoon);
    }
  }
  for (const int peer : peers_) channel.check_kept(peer);
  medium_.consume_through(first + chunks_ + 1);
  channel.await_readers(first + chunks_ + 1);
}

namespace {

/// Every rank (all_reduce) or the root alone (reduce) combines the slots of all.
class DirectReduce final : public RoundsCollective {
 public:
  DirectReduce(const Place& place, const Descriptor& descriptor, Bytes data, Combine combine)
      : RoundsCollective(place.medium, descriptor),
        rank_(place.channel.rank()),
        data_(data),
        combine_(combine),
        chunk_bytes_(place.medium.slot_bytes()),
        operands_(place.channel.size()) {
    descriptor_.bytes = data.size;
    const bool receives = descriptor_.kind == Kind::AllReduce || descriptor_.root == rank_;
    fills_ = descriptor_.kind == Kind::AllReduce || !receives;
    if (receives) sources_ = all_but(rank_, place.channel.size());
    if (!receives) offer(data.data, data.size, chunk_bytes_);
  }

 protected:
  uint64_t count_rounds(const Channel& channel) const override {
    return channel.size() == 1 ? 0 : divide_up(data_.size, chunk_bytes_);
  }
  void fill(uint64_t chunk, uint8_t* slot) override {
    medium_.copy(slot, data_.data + at(chunk), length(chunk), CopyHint::ReadSoon);
  }
  void drain(Channel& channel, uint64_t chunk, uint64_t round) override {
    for (const int source : sources_) operands_[source] = read(channel, source, round, at(chunk));
    operands_[rank_] = data_.data + at(chunk);
    medium_.combine(combine_, data_.data + at(chunk), operands_, length(chunk));
  }

 private:
  size_t at(uint64_t chunk) const { return chunk * chunk_bytes_; }
  size_t length(uint64_t chunk) const { return std::min(chunk_bytes_, data_.size - at(chunk)); }

  int rank_;
  Bytes data_;
  Combine combine_;
  size_t chunk_bytes_;
  std::vector<const void*> operands_;
};

/// A slot is cut into one part per receiving rank.
class ReduceScatter final : public RoundsCollective {
 public:
  ReduceScatter(const Place& place, const Descriptor& descriptor, std::vector<Bytes> inputs,
                bool inputs_adjoin, Bytes output, Combine combine)
      : RoundsCollective(place.medium, descriptor),
        rank_(place.channel.rank()),
        inputs_(std::move(inputs)),
        output_(output),
        combine_(combine),
        chunk_bytes_(place.medium.slot_bytes() / place.channel.size() / 64 * 64),
        operands_(place.channel.size()) {
    descriptor_.bytes = output.size * inputs_.size();
    fills_ = place.channel.size() > 1;
    sources_ = all_but(rank_, place.channel.size());
    if (inputs_adjoin) offer(inputs_[0].data, descriptor_.bytes, chunk_bytes_ * inputs_.size());
  }

 protected:
  uint64_t count_rounds(const Channel& channel) const override {
    return channel.size() == 1 ? 0 : divide_up(output_.size, chunk_bytes_);
  }
  void move_own_part() override {
    if (sources_.empty() && output_.size > 0)
      medium_.copy(output_.data, inputs_[0].data, output_.size, CopyHint::ReadSoon);
  }
  void fill(uint64_t chunk, uint8_t* slot) override {
    for (const int peer : sources_) {
      medium_.copy(slot + peer * chunk_bytes_, inputs_[peer].data + at(chunk), length(chunk),
                   CopyHint::ReadByPeers);
    }
  }
  void drain(Channel& channel, uint64_t chunk, uint64_t round) override {
    for (const int source : sources_) {
      operands_[source] =
          read(channel, source, round, rank_ * output_.size + at(chunk), rank_ * chunk_bytes_);
    }
    operands_[rank_] = inputs_[rank_].data + at(chunk);
    medium_.combine(combine_, output_.data + at(chunk), operands_, length(chunk));
  }

 private:
  size_t at(uint64_t chunk) const { return chunk * chunk_bytes_; }
  size_t length(uint64_t chunk) const { return std::min(chunk_bytes_, output_.size - at(chunk)); }

  int rank_;
  std::vector<Bytes> inputs_;
  Bytes output_;
  Combine combine_;
  size_t chunk_bytes_;
  std::vector<const void*> operands_;
};

}  // namespace

CollectivePtr make_all_reduce(const Place& place, Descriptor descriptor, Bytes data,
                              Combine combine) {
  if (place.channel.size() == 1 || data.size <= place.medium.most_direct())
    return std::make_unique<DirectReduce>(place, descriptor, data, combine);
  return std::make_unique<AllReduceLarge>(place, descriptor, data, combine);
}
CollectivePtr make_reduce(const Place& place, Descriptor descriptor, Bytes data, Combine combine) {
  return std::make_unique<DirectReduce>(place, descriptor, data, combine);
}
CollectivePtr make_reduce_scatter(const Place& place, Descriptor descriptor,
                                  std::vector<Bytes> inputs, bool inputs_adjoin, Bytes output,
                                  Combine combine) {
  return std::make_unique<ReduceScatter>(place, descriptor, std::move(inputs), inputs_adjoin,
                                         output, combine);
}

}  // namespace tessera::comm::shm
