#pragma once

#include "comm/shm/rounds.h"

#include <vector>

namespace tessera::comm::shm {

/// Note [large all-reduce]. Three ways, chosen alike on every rank once all descriptors are known:
/// - two ranks: each puts its chunk into a slot and combines the other's with its own; both do the
/// whole sum, but one
///   round suffices and the chunk is still in the cache when it is written;
/// - more ranks: each combines one part of every chunk and puts the result into a slot of the next
/// round, from where all
///   copy it: 1/n of the arithmetic for one more round;
/// - all tensors in shared memory: as before, but parts are read from and left in the tensors
/// themselves. Part r of a
///   chunk is touched by rank r alone until it says that the result is there, so working in place
///   is safe.
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

}  // namespace tessera::comm::shm
