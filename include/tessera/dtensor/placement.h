#pragma once

#include <tessera/comm.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// What the ranks along one mesh dimension hold of a tensor.
class Placement {
 public:
  enum class Kind : uint8_t {
    Replicate,  // each the whole
    Shard,      // each its chunk along a tensor dimension
    Partial,    // each a summand (or factor, …): the tensor is their reduction
  };

  constexpr Placement() = default;  // Replicate

  Kind kind() const { return kind_; }
  bool is_replicate() const { return kind_ == Kind::Replicate; }
  bool is_shard() const { return kind_ == Kind::Shard; }
  bool is_shard(int64_t tensor_dim) const { return is_shard() && dim_ == tensor_dim; }
  bool is_partial() const { return kind_ == Kind::Partial; }
  /// Of a Shard: the tensor dimension, negative ones counted from the end.
  int64_t dim() const { return dim_; }
  /// Of a Shard: how many pieces the dimension was cut into by mesh dimensions to the right, before
  /// this one; 1 for all but strided shards.
  int64_t split_factor() const { return split_factor_; }
  bool is_strided() const { return split_factor_ > 1; }
  /// Of a Partial: what makes the tensor of the ranks' parts.
  ReduceOp::RedOpType reduce_op() const { return reduce_op_; }

  friend bool operator==(const Placement&, const Placement&) = default;
  /// "Shard(0)", "Replicate()", "Partial(sum)", "StridedShard(0, 2)".
  friend std::ostream& operator<<(std::ostream& out, const Placement& placement);

 private:
  friend Placement Shard(int64_t tensor_dim);
  friend Placement StridedShard(int64_t tensor_dim, int64_t split_factor);
  friend Placement Partial(ReduceOp::RedOpType op);

  Kind kind_ = Kind::Replicate;
  ReduceOp::RedOpType reduce_op_ = ReduceOp::SUM;
  int16_t dim_ = 0;
  int32_t split_factor_ = 1;
};

using Placements = std::vector<Placement>;  // one per mesh dimension

/// Chunks of ceil(size / ranks) along the dimension, in rank order; the last may be shorter or
/// empty.
Placement Shard(int64_t tensor_dim);
/// The dimension is first cut into `split_factor` chunks (by mesh dimensions to the right of this
/// one) and each of these is sharded here: what sharding over "tp" and then over "dp" gives on a
/// mesh (dp, tp).
Placement StridedShard(int64_t tensor_dim, int64_t split_factor);
inline Placement Replicate() { return {}; }
/// SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR; or their names, "sum" to "bxor".
Placement Partial(ReduceOp::RedOpType op = ReduceOp::SUM);
Placement Partial(std::string_view op);

std::ostream& operator<<(std::ostream& out, const Placements& placements);

}  // namespace tessera
