#pragma once

#include <tessera/comm.h>

#include "dtensor/sharding.h"

#include <optional>

/// What each rank of a ring computes, and how tensors go round.
namespace tessera::parallel {

/// How ranks share a sequence that attends to itself.
struct RingLayout {
  int64_t rank = 0;
  int64_t ranks = 1;
  bool is_causal = false;
  bool load_balance = true;  // of 2 * ranks chunks rank r has r and 2 * ranks - 1 - r
};

/// The part of this rank's queries, and of the keys of another, that have to meet.
struct RingBlock {
  dtensor::Chunk queries, keys;
  bool is_causal = false;  // with the mask inside; otherwise every query sees every key
};

/// This rank's queries with the keys of rank `source`; none where the mask hides all of them.
std::optional<RingBlock> ring_block(const RingLayout& layout, int64_t source, int64_t queries,
                                    int64_t keys);

/// Passes tensors on to the next rank.
class Ring {
 public:
  explicit Ring(Group group);
  int64_t rank() const { return group_->getRank(); }
  int64_t ranks() const { return group_->getSize(); }
  /// Whose keys this rank has after so many of them were passed on.
  int64_t source(int64_t step) const { return (rank() - step + ranks()) % ranks(); }

  /// `flat` is on its way to the next rank, and the previous one's on its way here: wait(). All
  /// ranks pass on equally many numbers, in the same order. The caller holds `flat`, unchanged,
  /// until then.
  at::Tensor pass_on(const at::Tensor& flat) const;
  static at::Tensor wait(const at::Tensor& pending);

 private:
  Group group_;
};

}  // namespace tessera::parallel
