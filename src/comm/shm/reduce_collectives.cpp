// Collectives that combine what the ranks contribute. Operands are always combined in rank order,
// on whichever rank it happens, so every rank gets the same bits.
#include "comm/shm/all_reduce_large.h"
#include "comm/shm/rounds.h"

#include <algorithm>
#include <cstring>

namespace tessera::comm::shm {
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
    medium_.copy(slot, data_.data + at(chunk), length(chunk), Fate::ReadSoon);
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
      medium_.copy(output_.data, inputs_[0].data, output_.size, Fate::ReadSoon);
  }
  void fill(uint64_t chunk, uint8_t* slot) override {
    for (const int peer : sources_) {
      medium_.copy(slot + peer * chunk_bytes_, inputs_[peer].data + at(chunk), length(chunk),
                   Fate::ReadByPeers);
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
