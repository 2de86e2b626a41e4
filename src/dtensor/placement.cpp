#include <tessera/dtensor/placement.h>

#include "comm/reduce_op.h"

#include <c10/util/Exception.h>

#include <array>
#include <limits>

namespace tessera {
namespace {

constexpr std::array kPartialOps = {ReduceOp::SUM, ReduceOp::AVG,     ReduceOp::MIN,
                                    ReduceOp::MAX, ReduceOp::PRODUCT, ReduceOp::BAND,
                                    ReduceOp::BOR, ReduceOp::BXOR};

}  // namespace

Placement Shard(int64_t tensor_dim) { return StridedShard(tensor_dim, 1); }

Placement StridedShard(int64_t tensor_dim, int64_t split_factor) {
  TORCH_CHECK_VALUE(std::abs(tensor_dim) <= std::numeric_limits<int16_t>::max(),
                    "Shard: expected a tensor dimension, got ", tensor_dim);
  TORCH_CHECK_VALUE(split_factor >= 1 && split_factor <= std::numeric_limits<int32_t>::max(),
                    "StridedShard: expected a split factor of at least 1, got ", split_factor);
  Placement placement;
  placement.kind_ = Placement::Kind::Shard;
  placement.dim_ = static_cast<int16_t>(tensor_dim);
  placement.split_factor_ = static_cast<int32_t>(split_factor);
  return placement;
}

Placement Partial(ReduceOp::RedOpType op) {
  TORCH_CHECK_VALUE(std::find(kPartialOps.begin(), kPartialOps.end(), op) != kPartialOps.end(),
                    "Partial: expected SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR, got ",
                    static_cast<int>(op));
  Placement placement;
  placement.kind_ = Placement::Kind::Partial;
  placement.reduce_op_ = op;
  return placement;
}

Placement Partial(std::string_view op) {
  for (const auto known : kPartialOps) {
    if (comm::name_of_reduce(known) == op) return Partial(known);
  }
  TORCH_CHECK_VALUE(
      false, "Partial: expected sum, avg, min, max, product, band, bor or bxor, got '", op, "'");
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  switch (placement.kind()) {
    case Placement::Kind::Replicate:
      return out << "Replicate()";
    case Placement::Kind::Partial:
      return out << "Partial(" << comm::name_of_reduce(placement.reduce_op()) << ')';
    case Placement::Kind::Shard:
      break;
  }
  if (!placement.is_strided()) return out << "Shard(" << placement.dim() << ')';
  return out << "StridedShard(" << placement.dim() << ", " << placement.split_factor() << ')';
}

std::ostream& operator<<(std::ostream& out, const Placements& placements) {
  out << '[';
  for (size_t i = 0; i < placements.size(); ++i) out << (i == 0 ? "" : ", ") << placements[i];
  return out << ']';
}

}  // namespace tessera
