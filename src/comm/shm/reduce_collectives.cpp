// Collectives that combine what the ranks contribute. Operands are always combined in rank order,
// on whichever rank it happens, so every rank gets the same bits.
#include "comm/shm/all_reduce_large.h"
#include "comm/shm/copy.h"
#include "comm/shm/rounds.h"

#include <algorithm>
#include <cstring>

namespace tessera::comm::shm {
namespace {

// Up to here every rank reads every slot itself: one round instead of two, at the price of reading
// it all.
constexpr size_t kDirectBytes = size_t{128} << 10;

/// Every rank (all_reduce) or the root alone (reduce) combines the slots of all.
class DirectReduce final : public RoundsCollective {
 public:
  DirectReduce(const Channel& channel, const Descriptor& descriptor, Bytes data, Combine combine)
      : RoundsCollective(descriptor),
        rank_(channel.rank()),
        data_(data),
        combine_(combine),
        chunk_bytes_(channel.slot_bytes()),
        operands_(channel.size()) {
    descriptor_.bytes = data.size;
    const bool receives = descriptor_.kind == Kind::AllReduce || descriptor_.root == rank_;
    fills_ = descriptor_.kind == Kind::AllReduce || !receives;
    if (receives) sources_ = all_but(rank_, channel.size());
    if (!receives) offer(data.data, data.size, chunk_bytes_);
  }

 protected:
  uint64_t count_rounds(const Channel& channel) const override {
    return channel.size() == 1 ? 0 : divide_up(data_.size, chunk_bytes_);
  }
  void fill(uint64_t chunk, uint8_t* slot) override {
    copy_to_cache(slot, data_.data + at(chunk), length(chunk));
  }
  void drain(Channel& channel, uint64_t chunk, uint64_t round) override {
    for (const int source : sources_) operands_[source] = read(channel, source, round, at(chunk));
    operands_[rank_] = data_.data + at(chunk);
    combine_.kernel(data_.data + at(chunk), operands_.data(), static_cast<int>(operands_.size()),
                    length(chunk) / combine_.element_size);
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
  ReduceScatter(const Channel& channel, const Descriptor& descriptor, std::vector<Bytes> inputs,
                bool inputs_adjoin, Bytes output, Combine combine)
      : RoundsCollective(descriptor),
        rank_(channel.rank()),
        inputs_(std::move(inputs)),
        output_(output),
        combine_(combine),
        chunk_bytes_(channel.slot_bytes() / channel.size() / 64 * 64),
        operands_(channel.size()) {
    descriptor_.bytes = output.size * inputs_.size();
    fills_ = channel.size() > 1;
    sources_ = all_but(rank_, channel.size());
    if (inputs_adjoin) offer(inputs_[0].data, descriptor_.bytes, chunk_bytes_ * inputs_.size());
  }

 protected:
  uint64_t count_rounds(const Channel& channel) const override {
    return channel.size() == 1 ? 0 : divide_up(output_.size, chunk_bytes_);
  }
  void move_own_part() override {
    if (sources_.empty() && output_.size > 0)
      std::memmove(output_.data, inputs_[0].data, output_.size);
  }
  void fill(uint64_t chunk, uint8_t* slot) override {
    for (const int peer : sources_) {
      copy_for_peers(slot + peer * chunk_bytes_, inputs_[peer].data + at(chunk), length(chunk));
    }
  }
  void drain(Channel& channel, uint64_t chunk, uint64_t round) override {
    for (const int source : sources_) {
      operands_[source] =
          read(channel, source, round, rank_ * output_.size + at(chunk), rank_ * chunk_bytes_);
    }
    operands_[rank_] = inputs_[rank_].data + at(chunk);
    combine_.kernel(output_.data + at(chunk), operands_.data(), static_cast<int>(operands_.size()),
                    length(chunk) / combine_.element_size);
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

CollectivePtr make_all_reduce(const Channel& channel, Descriptor descriptor, Bytes data,
                              Combine combine) {
  const auto ranks = static_cast<size_t>(channel.size());
  const size_t direct =
      ranks <= 2 ? channel.slot_bytes() : std::min(channel.slot_bytes(), kDirectBytes / ranks);
  if (ranks == 1 || data.size <= direct)
    return std::make_unique<DirectReduce>(channel, descriptor, data, combine);
  return std::make_unique<AllReduceLarge>(channel, descriptor, data, combine);
}
CollectivePtr make_reduce(const Channel& channel, Descriptor descriptor, Bytes data,
                          Combine combine) {
  return std::make_unique<DirectReduce>(channel, descriptor, data, combine);
}
CollectivePtr make_reduce_scatter(const Channel& channel, Descriptor descriptor,
                                  std::vector<Bytes> inputs, bool inputs_adjoin, Bytes output,
                                  Combine combine) {
  return std::make_unique<ReduceScatter>(channel, descriptor, std::move(inputs), inputs_adjoin,
                                         output, combine);
}

}  // namespace tessera::comm::shm
