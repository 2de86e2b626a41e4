#pragma once

#include "base/memory.h"
#include "comm/shm/channel.h"
#include "comm/shm/reduce.h"

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::comm::shm {

/// memcpy into memory that other ranks read next: in cache or past it, whichever has been faster
/// lately.
void copy_for_peers(void* to, const void* from, size_t bytes);

/// How elements are combined; equal on all ranks.
struct Combine {
  Reduce kernel = nullptr;
  size_t element_size = 1;
  c10::ScalarType dtype = c10::kByte;
  Reduction reduction = Reduction::Sum;
};

/// What becomes of copied bytes next.
enum class CopyHint { ReadSoon, ReadByPeers, NotReadSoon };

/// Where the slots of a group's rounds lie (Note [rounds]) and who moves bytes to and from them:
/// the calling thread in host memory, or a device in its own. The algorithms are the same.
class Medium {
 public:
  virtual ~Medium() = default;

  virtual size_t slot_bytes() const = 0;
  /// Rounds a rank may fill before it drains them.
  virtual uint64_t rounds_ahead() const = 0;
  /// Whether a collective of one round may begin at its issue.
  virtual bool starts_at_issue() const = 0;
  /// Largest contribution that every rank reads from every other to combine it.
  virtual size_t most_direct() const = 0;

  /// This rank's slot for `round`, once no peer reads it any more.
  virtual uint8_t* slot(uint64_t round) = 0;
  /// A rank's slot, once it is posted.
  virtual const uint8_t* peer_slot(int peer, uint64_t round) = 0;
  virtual void post_through(uint64_t end) = 0;
  virtual void consume_through(uint64_t end) = 0;

  virtual void copy(uint8_t* to, const uint8_t* from, size_t bytes, CopyHint hint) = 0;
  /// In the order of `operands`; `out` may be one of them.
  virtual void combine(const Combine& how, uint8_t* out, const std::vector<const void*>& operands,
                       size_t bytes) = 0;
  /// Where `data` lies in this rank's arena, if peers can read it there.
  virtual std::optional<size_t> offset_of(const void* data, size_t bytes) const = 0;
};

/// The slots in the rank's block.
class HostMedium final : public Medium {
 public:
  explicit HostMedium(Channel& channel) : channel_(channel) {}

  size_t slot_bytes() const override { return channel_.slot_bytes(); }
  uint64_t rounds_ahead() const override;
  bool starts_at_issue() const override { return true; }
  size_t most_direct() const override;
  uint8_t* slot(uint64_t round) override { return channel_.slot(round); }
  const uint8_t* peer_slot(int peer, uint64_t round) override {
    return channel_.peer_slot(peer, round);
  }
  void post_through(uint64_t end) override { channel_.post_through(end); }
  void consume_through(uint64_t end) override { channel_.consume_through(end); }
  void copy(uint8_t* to, const uint8_t* from, size_t bytes, CopyHint hint) override;
  void combine(const Combine& how, uint8_t* out, const std::vector<const void*>& operands,
               size_t bytes) override;
  std::optional<size_t> offset_of(const void* data, size_t bytes) const override;

 private:
  Channel& channel_;
};

}  // namespace tessera::comm::shm
