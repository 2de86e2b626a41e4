// Linear algebra on batches of matrices: each matrix by itself.
#include "dtensor/rules/common_rules.h"

#include <algorithm>

namespace tessera::dtensor {
namespace {

/// Results that are left empty unless an argument asks for them.
struct Unasked {
  const char* argument;
  std::vector<size_t> outputs;
};

bool is_asked_by(const Call& call, const char* argument) {
  const auto& value = call.argument(argument);
  return value.isBool() ? value.toBool() : value.toStringRef() != "r";  // the mode of QR
}

/// An error found in one matrix is to be raised on all ranks: that takes all matrices.
bool raises_errors(const Call& call) {
  return call.has_argument("check_errors") && call.argument("check_errors").toBool();
}

/// Batches that fit without broadcasting. A right side may be a vector per matrix.
bool has_equal_batches(const Call& call, int64_t batch_ndim) {
  const auto& sizes = call.operand(0).sizes;
  for (size_t i = 1; i < call.input_count(); ++i) {
    if (!call.has(i)) continue;
    const auto& other = call.operand(i).sizes;
    if (static_cast<int64_t>(other.size()) <= batch_ndim ||
        static_cast<int64_t>(other.size()) > batch_ndim + 2 ||
        !std::equal(sizes.begin(), sizes.begin() + batch_ndim, other.begin()))
      return false;
  }
  return true;
}

Rule batch_rule(FindShapes shapes = {}, std::vector<Unasked> unasked = {}) {
  Rule rule;
  rule.rows = [unasked = std::move(unasked)](const Call& call, int64_t) {
    const auto batch_dims = leading_dims(2)(call);
    if (raises_errors(call) || !has_equal_batches(call, static_cast<int64_t>(batch_dims.size())))
      return Rows();
    auto rows = alike_rows(call, batch_dims);
    for (const auto& [argument, outputs] : unasked) {
      if (is_asked_by(call, argument)) continue;
      for (auto& row : rows) {
        for (const auto output : outputs) row.placements[output] = Replicate();
      }
    }
    return rows;
  };
  rule.takes_any_indices = true;
  rule.shapes = std::move(shapes);
  return rule;
}

/// Sizes of an operand whose batches fit; none if the operator may broadcast.
FindShapes like(size_t input) {
  return [input](const Call& call) {
    const int64_t batch_ndim = call.operand(0).ndim() - 2;
    if (batch_ndim < 0 || !has_equal_batches(call, batch_ndim)) return std::vector<Sizes>();
    return std::vector<Sizes>{call.operand(input).sizes};
  };
}

/// Of a matrix [..., m, n]: a vector of min(m, n).
Sizes diagonal_sizes(const Operand& matrix) {
  auto sizes = matrix.sizes;
  const int64_t columns = sizes.back();
  sizes.pop_back();
  sizes.back() = std::min(sizes.back(), columns);
  return sizes;
}

const Registration kWithMeta({"aten::linalg_cholesky_ex", "aten::linalg_inv_ex",
                              "aten::linalg_lu_factor_ex", "aten::linalg_lu_solve",
                              "aten::linalg_ldl_factor_ex", "aten::linalg_ldl_solve",
                              "aten::triangular_solve"},
                             batch_rule());

/// They return the decomposition of the transposed matrix if the matrix is contiguous.
Rule layout_rule() {
  auto rule = batch_rule();
  rule.reads_layout = true;
  return rule;
}
const Registration kDecomposed({"aten::_linalg_solve_ex", "aten::_linalg_det",
                                "aten::_linalg_slogdet"},
                               layout_rule());

const Registration kLikeFirst({"aten::cholesky", "aten::cholesky_inverse", "aten::cholesky_solve",
                               "aten::_cholesky_solve_helper", "aten::linalg_householder_product",
                               "aten::linalg_matrix_exp"},
                              batch_rule(like(0)));
const Registration kSolveTriangular({"aten::linalg_solve_triangular"}, batch_rule(like(1)));
const Registration kOrmqr({"aten::ormqr"}, batch_rule(like(2)));
const Registration kSvd({"aten::_linalg_svd"}, batch_rule({}, {{"compute_uv", {0, 2}}}));
const Registration kEigh({"aten::_linalg_eigh"}, batch_rule({}, {{"compute_v", {1}}}));
const Registration kQr({"aten::linalg_qr"}, batch_rule({}, {{"mode", {0}}}));
const Registration kLu({"aten::linalg_lu"}, batch_rule({}, {{"pivot", {0}}}));
const Registration kLuUnpack({"aten::lu_unpack"},
                             batch_rule({}, {{"unpack_data", {1, 2}}, {"unpack_pivots", {0}}}));
const Registration kEigenvalues({"aten::_linalg_eigvals"}, batch_rule([](const Call& call) {
                                  return std::vector<Sizes>{diagonal_sizes(call.operand(0))};
                                }));
const Registration kEig({"aten::linalg_eig"}, batch_rule([](const Call& call) {
                          const auto& matrix = call.operand(0);
                          return std::vector<Sizes>{diagonal_sizes(matrix), matrix.sizes};
                        }));
const Registration kGeqrf({"aten::geqrf"}, batch_rule([](const Call& call) {
                            const auto& matrix = call.operand(0);
                            return std::vector<Sizes>{matrix.sizes, diagonal_sizes(matrix)};
                          }));

/// Tolerances, where given, may be one for all matrices, not one for each.
Rule pseudo_inverse_rule() {
  auto rule = batch_rule([](const Call& call) {
    auto sizes = call.operand(0).sizes;
    std::swap(sizes[sizes.size() - 1], sizes[sizes.size() - 2]);
    return std::vector<Sizes>{sizes};
  });
  rule.rows = [](const Call& call, int64_t) {
    Rows rows;
    for (size_t i = 1; i < call.input_count(); ++i) {
      if (call.has(i) && call.operand(i).ndim() > 0) return rows;
    }
    for (const auto dim : leading_dims(2)(call))
      rows.push_back({Shard(dim), Shard(dim), Replicate(), Replicate()});
    return rows;
  };
  return rule;
}
const Registration kPseudoInverse({"aten::linalg_pinv.atol_rtol_tensor"}, pseudo_inverse_rule());
/// Raises for all ranks or for none.
const Registration kCheckErrors({"aten::_linalg_check_errors"}, no_rows());

const Registration kCross({"aten::linalg_cross"}, [] {
  auto rule = alike_rule(dims_beside("dim"));
  rule.takes_empty_shards = true;
  return rule;
}());
const Registration kGlu({"aten::glu"}, alike_rule(dims_beside("dim")));
const Registration kGluBackward({"aten::glu_backward"},
                                alike_rule(dims_beside("dim"), sizes_of({1})));

/// [..., p, width] and [..., r, width] -> distances [..., p, r]
Rows distance_rows(const Call& call, int64_t) {
  const int64_t ndim = call.operand(0).ndim();
  if (call.operand(1).ndim() != ndim) return {};
  auto rows = alike_rows(call, leading_dims(2)(call));
  rows.push_back({Shard(ndim - 2), Shard(ndim - 2), Replicate()});
  rows.push_back({Shard(ndim - 1), Replicate(), Shard(ndim - 2)});
  return rows;
}

std::vector<Sizes> distance_sizes(const Call& call) {
  const int64_t batch_ndim = call.operand(0).ndim() - 2;
  if (!has_equal_batches(call, batch_ndim) || call.operand(1).ndim() != batch_ndim + 2) return {};
  auto sizes = call.operand(0).sizes;
  sizes.back() = call.operand(1).sizes[batch_ndim];
  return {sizes};
}

/// (grad, x1, x2, distances) -> the gradient of x1
Rows distance_backward_rows(const Call& call, int64_t) {
  const int64_t batch_ndim = call.operand(0).ndim() - 2;
  if (!has_equal_batches(call, batch_ndim)) return {};
  auto rows = alike_rows(call, leading_dims(2)(call));
  const auto left = Shard(batch_ndim);
  rows.push_back({left, left, left, Replicate(), left});
  const auto right = Shard(batch_ndim + 1);
  rows.push_back({Partial(), right, Replicate(), left, right});
  return rows;
}

Rule distance_rule(Rows (*rows)(const Call&, int64_t), FindShapes shapes) {
  Rule rule;
  rule.rows = rows;
  rule.takes_any_indices = true;
  rule.shapes = std::move(shapes);
  return rule;
}
const Registration kDistances({"aten::_cdist_forward", "aten::_euclidean_dist"},
                              distance_rule(distance_rows, distance_sizes));
const Registration kDistancesBackward({"aten::_cdist_backward"},
                                      distance_rule(distance_backward_rows, sizes_of({1})));

}  // namespace
}  // namespace tessera::dtensor
