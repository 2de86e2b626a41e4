#pragma once

#include "comm/shm/medium.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace tessera::comm::shm {

/// One collective on this rank, in memory of one medium. start() announces it and, if it is small,
/// already puts this rank's part where the peers look, without waiting; finish() does the rest. The
/// memory must stay until finish() returns.
class Collective {
 public:
  Collective(Medium& medium, const Descriptor& descriptor)
      : descriptor_(descriptor), medium_(medium) {}
  virtual ~Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  const Descriptor& descriptor() const { return descriptor_; }
  /// Whether start() does all of this rank's writing at once, given free slots.
  virtual bool starts_at_once(const Channel& channel) const = 0;
  bool has_started() const { return has_started_; }
  void start(Channel& channel);
  void finish(Channel& channel);

  std::chrono::milliseconds timeout{0};

 protected:
  virtual void begin(Channel& channel) = 0;
  virtual void complete(Channel& channel) = 0;

  Descriptor descriptor_;
  Medium& medium_;

 private:
  bool has_started_ = false;
};

struct Bytes {
  uint8_t* data = nullptr;
  size_t size = 0;
};

/// The group, and where the collective's memory lies.
struct Place {
  Channel& channel;
  Medium& medium;
};

using CollectivePtr = std::unique_ptr<Collective>;

// `descriptor` has kind, dtype, reduce and root filled in; the sizes are set here.
CollectivePtr make_all_reduce(const Place& place, Descriptor descriptor, Bytes data,
                              Combine combine);
CollectivePtr make_reduce(const Place& place, Descriptor descriptor, Bytes data, Combine combine);
/// inputs: by destination, all of output.size bytes; lying one after another in memory if
/// `inputs_adjoin`.
CollectivePtr make_reduce_scatter(const Place& place, Descriptor descriptor,
                                  std::vector<Bytes> inputs, bool inputs_adjoin, Bytes output,
                                  Combine combine);
CollectivePtr make_broadcast(const Place& place, Descriptor descriptor, Bytes data);
/// outputs: by source, sizes may differ between ranks.
CollectivePtr make_all_gather(const Place& place, Descriptor descriptor, Bytes input,
                              std::vector<Bytes> outputs);
/// outputs: by source, on the root alone.
CollectivePtr make_gather(const Place& place, Descriptor descriptor, Bytes input,
                          std::vector<Bytes> outputs);
/// inputs: by destination, on the root alone.
CollectivePtr make_scatter(const Place& place, Descriptor descriptor, std::vector<Bytes> inputs,
                           Bytes output);
CollectivePtr make_all_to_all(const Place& place, Descriptor descriptor, std::vector<Bytes> inputs,
                              std::vector<Bytes> outputs);
/// A barrier, monitored or not: the error of a monitored one names all that are missing.
CollectivePtr make_barrier(const Place& place, Descriptor descriptor);

/// A collective in which every rank writes at most one slot per round and reads slots of the same
/// round: all but the large all-reduces. A subclass says how a slot is filled and what is done with
/// the peers' slots.
class RoundsCollective : public Collective {
 public:
  using Collective::Collective;
  bool starts_at_once(const Channel& channel) const override;

 protected:
  /// The same number on every rank. Called after the peers' descriptors are known if
  /// `needs_peers_for_rounds`.
  virtual uint64_t count_rounds(const Channel& channel) const = 0;
  virtual void fill(uint64_t /*chunk*/, uint8_t* /*slot*/) {}
  virtual void drain(Channel& /*channel*/, uint64_t /*chunk*/, uint64_t /*round*/) {}
  /// Called once all sources have announced the same collective: check what only this operation
  /// knows.
  virtual void check_sources(Channel& /*channel*/) {}
  /// This rank's own part of the result, copied without the slots.
  virtual void move_own_part() {}

  /// Bytes of `peer`'s contribution from `displacement` on, which stand at `in_slot` of its slot
  /// for `round`: there, or straight in its tensor if that lives in shared memory.
  const uint8_t* read(Channel& channel, int peer, uint64_t round, size_t displacement,
                      size_t in_slot = 0);
  /// Lets peers read `data` by address if it lies in this process's arena and one round can't carry
  /// it. A peer may have started a collective of one round and be busy elsewhere, with us: we must
  /// not wait for it to read.
  void offer(const void* data, size_t bytes, size_t one_round);
  bool is_offered() const { return descriptor_.shared_offset >= 0; }

  bool fills_ = false;        // whether this rank's slots carry anything
  std::vector<int> sources_;  // peers whose slots this rank reads
  bool needs_peers_for_rounds_ = false;

  void begin(Channel& channel) override;
  void complete(Channel& channel) override;

 private:
  void take(Channel& channel);
  void fill_next();
  void drain_next(Channel& channel);

  uint64_t first_ = 0;
  uint64_t rounds_ = 0;
  uint64_t filled_ = 0;
  uint64_t drained_ = 0;
};

/// Every rank but `rank`, from the next one on.
std::vector<int> all_but(int rank, int size);
inline uint64_t divide_up(uint64_t value, uint64_t by) { return (value + by - 1) / by; }

}  // namespace tessera::comm::shm
