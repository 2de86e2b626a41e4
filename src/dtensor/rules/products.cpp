// Linear operators: products with vectors and with batches that are summed, added to something;
// Fourier transforms; masks.
#include "dtensor/rules.h"
#include "dtensor/rules/common_rules.h"

#include <algorithm>

namespace tessera::dtensor {

// Products of matrices. Each dimension that is not summed over may be sharded; if one that is
// summed over is, the sums are pending.

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

/// Kernels of whole numbers take beta and alpha as whole ones, but where nothing is summed, as on a
/// rank with an empty shard, they refuse others: one rank alone would throw.
void make_scalars_whole(const c10::FunctionSchema& schema, torch::jit::Stack& local) {
  if (!c10::isIntegralType(local[0].toTensor().scalar_type(), /*includeBool=*/false)) return;
  for (size_t i = 0; i < local.size(); ++i) {
    const auto& name = schema.arguments()[i].name();
    if ((name == "beta" || name == "alpha") && local[i].isDouble())
      local[i] = static_cast<int64_t>(local[i].toDouble());
  }
}

Rule whole_scalars(Rule rule) {
  rule.prepare = make_scalars_whole;
  return rule;
}

/// beta * input + product: the addend, broadcast, lies as the result does.
Rule with_addend(Rows product_rows) {
  auto rule = whole_scalars(on_any_indices({}));
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

/// beta * addend + product: rows of the product, completed by the addend, which is broadcast to the
/// result.
Rule added(Rows product_rows, Sizes (*result_sizes)(const Call&)) {
  Rule rule;
  rule.rows = [product_rows = std::move(product_rows), result_sizes](const Call& call, int64_t) {
    const auto sizes = result_sizes(call);
    Rows rows;
    for (const auto& row : product_rows) {
      const auto& result = row.placements[0];
      auto longer = row.placements;
      longer.insert(longer.begin() + 1, result.is_shard()
                                            ? broadcast_shard(call.operand(0), result.dim(), sizes)
                                            : result);
      rows.emplace_back(std::move(longer));
    }
    return rows;
  };
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.shapes = [result_sizes](const Call& call) { return std::vector<Sizes>{result_sizes(call)}; };
  return rule;
}

const Registration kAddr({"aten::addr"},  // [n] x [m]
                         added({{Shard(0), Shard(0), Replicate()},
                                {Shard(1), Replicate(), Shard(0)}},
                               [](const Call& call) {
                                 return Sizes{call.operand(1).sizes[0], call.operand(2).sizes[0]};
                               }));

/// Without rows the kernel refuses an addend without dimensions: one rank alone would throw.
void expand_addend(const c10::FunctionSchema&, torch::jit::Stack& local) {
  const auto addend = local[0].toTensor();
  if (addend.dim() == 0) local[0] = addend.expand({local[1].toTensor().size(0)});
}

Rule with_expanded_addend(Rule rule) {
  rule.prepare = expand_addend;
  return rule;
}

const Registration kAddmv(
    {"aten::addmv"},  // [n, k] x [k]
    with_expanded_addend(added({{Shard(0), Shard(0), Replicate()}, {Partial(), Shard(1), Shard(0)}},
                               [](const Call& call) { return Sizes{call.operand(1).sizes[0]}; })));
const Registration kAddbmm({"aten::addbmm"},  // [b, n, k] x [b, k, m], summed over b
                           whole_scalars(added({{Shard(0), Shard(1), Replicate()},
                                                {Shard(1), Replicate(), Shard(2)},
                                                {Partial(), Shard(0), Shard(0)},
                                                {Partial(), Shard(2), Shard(1)}},
                                               [](const Call& call) {
                                                 return Sizes{call.operand(1).sizes[1],
                                                              call.operand(2).sizes[2]};
                                               })));
const Registration kAddmmActivation({"aten::_addmm_activation"},  // [n, k] x [k, m]
                                    added({{Shard(0), Shard(0), Replicate()},
                                           {Shard(1), Replicate(), Shard(1)}},
                                          [](const Call& call) {
                                            return Sizes{call.operand(1).sizes[0],
                                                         call.operand(2).sizes[1]};
                                          }));

/// Filling with 0 is a product with a mask: sums pass.
Rule masked_fill_rule() {
  auto rule = pointwise_rule();
  rule.rows = [elementwise = rule.rows](const Call& call, int64_t ranks) {
    auto rows = elementwise(call, ranks);
    if (call.argument("value").toScalar().toComplexDouble() != 0.0) return rows;
    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG})
      rows.push_back({Partial(op), Partial(op), Replicate()});
    return rows;
  };
  return rule;
}
const Registration kMaskedFill({"aten::masked_fill.Scalar", "aten::masked_fill_.Scalar"},
                               masked_fill_rule());

/// Transforms are linear, and work along `dim` alone.
Rule fourier_rule(FindShapes shapes) {
  auto rule = alike_rule(dims_beside("dim"), std::move(shapes));
  rule.rows = [alike = rule.rows](const Call& call, int64_t ranks) {
    auto rows = alike(call, ranks);
    rows.push_back({Partial(), Partial()});
    return rows;
  };
  return rule;
}

/// The last transformed dimension, which alone changes its size.
size_t last_dim(const Call& call) {
  return static_cast<size_t>(call.dims("dim", call.operand(0).ndim()).back());
}

std::vector<Sizes> half_spectrum(const Call& call) {
  auto sizes = call.operand(0).sizes;
  if (call.argument("onesided").toBool()) sizes[last_dim(call)] = sizes[last_dim(call)] / 2 + 1;
  return {sizes};
}

std::vector<Sizes> real_signal(const Call& call) {
  auto sizes = call.operand(0).sizes;
  sizes[last_dim(call)] = call.argument("last_dim_size").toInt();
  return {sizes};
}

const Registration kFourier({"aten::_fft_c2c"}, fourier_rule(sizes_of({0})));
const Registration kFourierOfReal({"aten::_fft_r2c"}, fourier_rule(half_spectrum));
const Registration kFourierToReal({"aten::_fft_c2r"}, fourier_rule(real_signal));

}  // namespace
}  // namespace tessera::dtensor
