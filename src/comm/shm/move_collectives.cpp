// Collectives that move bytes and leave them as they are.
#include "comm/shm/collective.h"

#include <algorithm>

namespace tessera::comm::shm {
namespace {

// Results from this size on leave the cache before anybody reads them.
constexpr size_t kStreamedBytes = size_t{4} << 20;

/// Of a part of a result of `total` bytes.
CopyHint fate_of_result(size_t total) {
  return total < kStreamedBytes ? CopyHint::ReadSoon : CopyHint::NotReadSoon;
}

/// Bytes of a stream of `total` that go into chunk `chunk` of at most `chunk_bytes`.
size_t chunk_length(size_t total, uint64_t chunk, size_t chunk_bytes) {
  const size_t begin = chunk * chunk_bytes;
  return begin >= total ? 0 : std::min(chunk_bytes, total - begin);
}

class Broadcast final : public RoundsCollective {
 public:
  Broadcast(const Place& place, const Descriptor& descriptor, Bytes data)
      : RoundsCollective(place.medium, descriptor),
        data_(data),
        chunk_bytes_(place.medium.slot_bytes()) {
    descriptor_.bytes = data.size;
    fills_ = place.channel.rank() == descriptor_.root;
    if (fills_)
      offer(data.data, data.size, chunk_bytes_);
    else
      sources_ = {descriptor_.root};
  }

 protected:
  uint64_t count_rounds(const Channel&) const override {
    return divide_up(data_.size, chunk_bytes_);
  }
  void fill(uint64_t chunk, uint8_t* slot) override {
    medium_.copy(slot, data_.data + chunk * chunk_bytes_,
                 chunk_length(data_.size, chunk, chunk_bytes_), CopyHint::ReadSoon);
  }
  void drain(Channel& channel, uint64_t chunk, uint64_t round) override {
    const size_t at = chunk * chunk_bytes_;
    const auto* from = read(channel, descriptor_.root, round, at);
    medium_.copy(data_.data + at, from, chunk_length(data_.size, chunk, chunk_bytes_),
                 fate_of_result(data_.size));
  }

 private:
  Bytes data_;
  size_t chunk_bytes_;
};

std::vector<uint64_t> sizes_of(const std::vector<Bytes>& parts) {
  std::vector<uint64_t> sizes;
  for (const auto& part : parts) sizes.push_back(part.size);
  return sizes;
}

/// Every rank (all_gather) or the root alone (gather) receives what every rank sends.
class Gather final : public RoundsCollective {
 public:
  Gather(const Place& place, const Descriptor& descriptor, Bytes input, std::vector<Bytes> outputs)
      : RoundsCollective(place.medium, descriptor),
        rank_(place.channel.rank()),
        input_(input),
        outputs_(std::move(outputs)),
        chunk_bytes_(place.medium.slot_bytes()) {
    descriptor_.bytes = input.size;
    descriptor_.largest_part = input.size;
    const bool receives = !outputs_.empty();
    fills_ = descriptor_.kind == Kind::AllGather || !receives;
    if (fills_) offer(input.data, input.size, chunk_bytes_);
    if (descriptor_.kind == Kind::AllGather) set_parts(descriptor_, sizes_of(outputs_));
    if (receives) sources_ = all_but(rank_, place.channel.size());
    largest_ = input.size;
    for (const auto& output : outputs_) {
      largest_ = std::max(largest_, output.size);
      total_ += output.size;
    }
  }

 protected:
  uint64_t count_rounds(const Channel&) const override { return divide_up(largest_, chunk_bytes_); }
  void move_own_part() override {
    // Otherwise fill() does it, while the chunk is in the cache.
    if (!outputs_.empty() && (!fills_ || is_offered()))
      medium_.copy(outputs_[rank_].data, input_.data, input_.size, CopyHint::ReadSoon);
  }
  void fill(uint64_t chunk, uint8_t* slot) override {
    const size_t at = chunk * chunk_bytes_;
    const size_t length = chunk_length(input_.size, chunk, chunk_bytes_);
    medium_.copy(slot, input_.data + at, length, CopyHint::ReadSoon);
    if (!outputs_.empty())
      medium_.copy(outputs_[rank_].data + at, input_.data + at, length, fate_of_result(total_));
  }
  void drain(Channel& channel, uint64_t chunk, uint64_t round) override {
    const size_t at = chunk * chunk_bytes_;
    for (const int source : sources_) {
      const auto& output = outputs_[source];
      const auto* from = read(channel, source, round, at);
      medium_.copy(output.data + at, from, chunk_length(output.size, chunk, chunk_bytes_),
                   fate_of_result(total_));
    }
  }

 private:
  int rank_;
  Bytes input_;
  std::vector<Bytes> outputs_;
  size_t chunk_bytes_;
  size_t largest_ = 0;
  size_t total_ = 0;
};

/// Every rank (all_to_all) or the root alone (scatter) sends a different part to each rank. A slot
/// is cut into as many equal parts as there are ranks.
class Exchange final : public RoundsCollective {
 public:
  Exchange(const Place& place, const Descriptor& descriptor, std::vector<Bytes> inputs,
           std::vector<Bytes> outputs)
      : RoundsCollective(place.medium, descriptor),
        rank_(place.channel.rank()),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        chunk_bytes_(place.medium.slot_bytes() / place.channel.size() / 64 * 64) {
    fills_ = !inputs_.empty();
    const bool is_scatter = descriptor_.kind == Kind::Scatter;
    needs_peers_for_rounds_ = !is_scatter;
    for (const auto& input : inputs_)
      descriptor_.largest_part = std::max<uint64_t>(descriptor_.largest_part, input.size);
    if (is_scatter) {
      descriptor_.bytes = outputs_[0].size;
      if (!fills_) sources_ = {descriptor_.root};
    } else {
      for (const auto& input : inputs_) descriptor_.bytes += input.size;
      set_parts(descriptor_, rank_, sizes_of(inputs_), sizes_of(outputs_));
      sources_ = all_but(rank_, place.channel.size());
    }
  }

 protected:
  uint64_t count_rounds(const Channel& channel) const override {
    if (descriptor_.kind == Kind::Scatter) return divide_up(outputs_[0].size, chunk_bytes_);
    uint64_t largest = descriptor_.largest_part;
    for (const int source : sources_) {
      largest = std::max(largest, channel.descriptor_of(source, descriptor_.sequence).largest_part);
    }
    return divide_up(largest, chunk_bytes_);
  }
  void check_sources(Channel& channel) override {
    if (descriptor_.kind == Kind::Scatter) return;
    uint64_t layouts = 0;
    for (int rank = 0; rank < channel.size(); ++rank)
      layouts += channel.descriptor_of(rank, descriptor_.sequence).layout;
    if (layouts != 0) channel.fail_disagreement(descriptor_.sequence);
  }
  void move_own_part() override {
    if (inputs_.empty()) return;
    const auto& output = output_from(rank_);
    medium_.copy(output.data, inputs_[rank_].data, output.size, CopyHint::ReadSoon);
  }
  void fill(uint64_t chunk, uint8_t* slot) override {
    for (size_t peer = 0; peer < inputs_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_) continue;
      medium_.copy(slot + peer * chunk_bytes_, inputs_[peer].data + chunk * chunk_bytes_,
                   chunk_length(inputs_[peer].size, chunk, chunk_bytes_), CopyHint::ReadSoon);
    }
  }
  void drain(Channel& channel, uint64_t chunk, uint64_t round) override {
    for (const int source : sources_) {
      const auto& output = output_from(source);
      const auto* part = medium_.peer_slot(source, round) + rank_ * chunk_bytes_;
      medium_.copy(output.data + chunk * chunk_bytes_, part,
                   chunk_length(output.size, chunk, chunk_bytes_), fate_of_result(output.size));
    }
  }

 private:
  const Bytes& output_from(int source) const {
    return descriptor_.kind == Kind::Scatter ? outputs_[0] : outputs_[source];
  }

  int rank_;
  std::vector<Bytes> inputs_;
  std::vector<Bytes> outputs_;
  size_t chunk_bytes_;
};

class Barrier final : public RoundsCollective {
 public:
  using RoundsCollective::RoundsCollective;

 protected:
  uint64_t count_rounds(const Channel&) const override { return 0; }
  void check_sources(Channel& channel) override {
    for (const int peer : all_but(channel.rank(), channel.size())) channel.meet(peer);
  }
};

}  // namespace

CollectivePtr make_broadcast(const Place& place, Descriptor descriptor, Bytes data) {
  return std::make_unique<Broadcast>(place, descriptor, data);
}
CollectivePtr make_all_gather(const Place& place, Descriptor descriptor, Bytes input,
                              std::vector<Bytes> outputs) {
  return std::make_unique<Gather>(place, descriptor, input, std::move(outputs));
}
CollectivePtr make_gather(const Place& place, Descriptor descriptor, Bytes input,
                          std::vector<Bytes> outputs) {
  return std::make_unique<Gather>(place, descriptor, input, std::move(outputs));
}
CollectivePtr make_scatter(const Place& place, Descriptor descriptor, std::vector<Bytes> inputs,
                           Bytes output) {
  return std::make_unique<Exchange>(place, descriptor, std::move(inputs),
                                    std::vector<Bytes>{output});
}
CollectivePtr make_all_to_all(const Place& place, Descriptor descriptor, std::vector<Bytes> inputs,
                              std::vector<Bytes> outputs) {
  return std::make_unique<Exchange>(place, descriptor, std::move(inputs), std::move(outputs));
}
CollectivePtr make_barrier(const Place& place, Descriptor descriptor) {
  return std::make_unique<Barrier>(place.medium, descriptor);
}

}  // namespace tessera::comm::shm
