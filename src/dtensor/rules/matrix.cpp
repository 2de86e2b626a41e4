// Products of matrices. Each dimension that is not summed over may be sharded; if one that is
// summed over is, the sums are pending.
#include "dtensor/rules.h"

namespace tessera::dtensor {
namespace {

Rule on_any_indices(Rows rows) {
  Rule rule;
  rule.rows = [rows = std::move(rows)](const Call&, int64_t) { return rows; };
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  return rule;
}

const Registration kMm({"aten::mm"},  // [m, k] x [k, n]
                       on_any_indices({{Shard(0), Shard(0), Replicate()},
                                       {Shard(1), Replicate(), Shard(1)},
                                       {Partial(), Shard(1), Shard(0)},
                                       {Partial(), Partial(), Replicate()},
                                       {Partial(), Replicate(), Partial()}}));
const Registration kBmm({"aten::bmm"},  // [b, m, k] x [b, k, n]
                        on_any_indices({{Shard(0), Shard(0), Shard(0)},
                                        {Shard(1), Shard(1), Replicate()},
                                        {Shard(2), Replicate(), Shard(2)},
                                        {Partial(), Shard(2), Shard(1)},
                                        {Partial(), Partial(), Replicate()},
                                        {Partial(), Replicate(), Partial()}}));
const Registration kMv({"aten::mv"},  // [m, k] x [k]
                       on_any_indices({{Shard(0), Shard(0), Replicate()},
                                       {Partial(), Shard(1), Shard(0)},
                                       {Partial(), Partial(), Replicate()},
                                       {Partial(), Replicate(), Partial()}}));
const Registration kDot({"aten::dot", "aten::vdot"},  // [k] x [k]
                        on_any_indices({{Partial(), Shard(0), Shard(0)}}));

/// beta * input + product: the addend, broadcast, lies as the result does.
Rule with_addend(Rows product_rows) {
  auto rule = on_any_indices({});
  rule.rows = [product_rows = std::move(product_rows)](const Call& call, int64_t) {
    const auto& addend = call.operand(0);
    const int64_t ndim = call.operand(1).ndim();
    Rows rows;
    for (const auto& row : product_rows) {
      const auto& result = row.placements[0];
      auto own = result;
      if (result.is_shard()) {
        const int64_t dim = result.dim() - (ndim - addend.ndim());
        own = dim < 0 || addend.sizes[dim] == 1 ? Replicate() : Shard(dim);
      }
      auto longer = row.placements;
      longer.insert(longer.begin() + 1, own);
      rows.emplace_back(std::move(longer));
    }
    return rows;
  };
  return rule;
}

const Registration kAddmm({"aten::addmm"}, with_addend({{Shard(0), Shard(0), Replicate()},
                                                        {Shard(1), Replicate(), Shard(1)},
                                                        {Partial(), Shard(1), Shard(0)},
                                                        {Partial(), Partial(), Replicate()},
                                                        {Partial(), Replicate(), Partial()}}));
const Registration kBaddbmm({"aten::baddbmm"}, with_addend({{Shard(0), Shard(0), Shard(0)},
                                                            {Shard(1), Shard(1), Replicate()},
                                                            {Shard(2), Replicate(), Shard(2)},
                                                            {Partial(), Shard(2), Shard(1)},
                                                            {Partial(), Partial(), Replicate()},
                                                            {Partial(), Replicate(), Partial()}}));

}  // namespace
}  // namespace tessera::dtensor
