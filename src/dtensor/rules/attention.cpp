// Fused attention of queries [batch, heads, queries, width] to keys and values [batch, heads, keys,
// width]: samples and heads are independent; so are queries, where no position counts.
#include "dtensor/rules/common_rules.h"

#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <string_view>

namespace tessera::dtensor {
namespace {

constexpr int64_t kBatchDim = 0;
constexpr int64_t kHeadDim = 1;
constexpr int64_t kQueryDim = 2;

/// What an argument is, by its name in the schemas.
enum class Role { Query, Key, Mask, Other };

Role role_of(std::string_view name) {
  for (const auto* query : {"query", "grad_out", "grad_out_", "out", "logsumexp"}) {
    if (name == query) return Role::Query;
  }
  if (name == "key" || name == "value") return Role::Key;
  return name == "attn_mask" || name == "attn_bias" ? Role::Mask : Role::Other;
}

size_t find_input(const Call& call, std::string_view name) {
  for (size_t i = 0; i < call.input_count(); ++i) {
    if (call.schema().arguments()[call.inputs()[i].index].name() == name) return i;
  }
  TORCH_INTERNAL_ASSERT(false, call.schema(), " has no tensor argument ", name);
}

/// [batch, heads, queries, keys], which masks are broadcast to.
Sizes score_sizes(const Call& call) {
  auto sizes = call.operand(find_input(call, "query")).sizes;
  sizes[3] = call.operand(find_input(call, "key")).sizes[2];
  return sizes;
}

/// Arguments of a row in which the queries are cut along `dim`.
void place_inputs(const Call& call, std::vector<Placement>& row, int64_t dim) {
  const auto scores = score_sizes(call);
  for (size_t i = 0; i < call.input_count(); ++i) {
    auto& placement = row[call.output_count() + i];
    const auto role = role_of(call.schema().arguments()[call.inputs()[i].index].name());
    if (role == Role::Query || (role == Role::Key && dim != kQueryDim)) placement = Shard(dim);
    if (role == Role::Mask && call.has(i))
      placement = broadcast_shard(call.operand(i), dim, scores);
  }
}

/// Not nested, not random, not quantized.
bool is_regular(const Call& call) {
  if (call.has_argument("q_descale")) return false;
  const auto& query = call.operand(find_input(call, "query"));
  const auto& key = call.operand(find_input(call, "key"));
  const auto& value = call.operand(find_input(call, "value"));
  return query.ndim() == 4 && key.ndim() == 4 && value.ndim() == 4 &&
         query.sizes[kBatchDim] == key.sizes[kBatchDim] &&
         query.sizes[kBatchDim] == value.sizes[kBatchDim] &&
         key.sizes[kHeadDim] == value.sizes[kHeadDim] && call.argument("dropout_p").toDouble() == 0;
}

/// Dimensions along which queries may be cut. Kernels for CUDA return how many queries there are,
/// which would be told of the part.
std::vector<int64_t> query_dims(const Call& call) {
  std::vector<int64_t> dims;
  if (!is_regular(call)) return dims;
  dims = {kBatchDim, kHeadDim};
  const bool is_for_cpu = call.schema().name().find("_for_cpu") != std::string::npos;
  if (is_for_cpu && !call.argument("is_causal").toBool()) dims.push_back(kQueryDim);
  return dims;
}

/// Several heads of queries may share one of keys: then each rank needs whole sets of them.
bool must_be_even(const Call& call, int64_t dim) {
  return dim == kHeadDim && call.operand(find_input(call, "query")).sizes[kHeadDim] !=
                                call.operand(find_input(call, "key")).sizes[kHeadDim];
}

Rows attention_rows(const Call& call, int64_t) {
  Rows rows;
  for (const auto dim : query_dims(call)) {
    auto row = call.row();
    row[0] = row[1] = Shard(dim);  // output, logsumexp
    place_inputs(call, row, dim);
    rows.emplace_back(std::move(row), must_be_even(call, dim));
  }
  return rows;
}

/// The gradient of a mask that is broadcast along `dim` is a sum over it.
Placement mask_gradient(const Call& call, int64_t dim) {
  const auto mask = find_input(call, "attn_bias");
  if (!call.has(mask) || !call.argument("grad_input_mask").toBoolList().get(3)) return Replicate();
  const auto placement = broadcast_shard(call.operand(mask), dim, score_sizes(call));
  return placement.is_shard() ? placement : Partial();
}

Rows attention_backward_rows(const Call& call, int64_t) {
  Rows rows;
  for (const auto dim : query_dims(call)) {
    auto row = call.row();
    row[0] = Shard(dim);
    row[1] = row[2] = dim == kQueryDim ? Partial() : Shard(dim);
    if (call.output_count() == 4) row[3] = mask_gradient(call, dim);
    place_inputs(call, row, dim);
    rows.emplace_back(std::move(row), must_be_even(call, dim));
  }
  return rows;
}

/// Memory-efficient attention takes masks whose rows begin at such multiples. libtorch pads them to
/// that, but a part that was moved is dense.
constexpr int64_t kMaskAlignment = 16;  // elements

void align_mask(const c10::FunctionSchema& schema, torch::jit::Stack& local) {
  const auto index = schema.argumentIndexWithName("attn_bias");
  if (!index || !local[*index].isTensor() || !local[*index].toTensor().defined()) return;
  const auto mask = local[*index].toTensor();
  const auto strides = mask.strides();
  const bool is_aligned = strides.back() == 1 &&
                          std::all_of(strides.begin(), strides.end() - 1,
                                      [](int64_t stride) { return stride % kMaskAlignment == 0; });
  if (is_aligned) return;
  const auto keys = mask.size(-1);
  const auto missing = (kMaskAlignment - keys % kMaskAlignment) % kMaskAlignment;
  local[*index] = at::constant_pad_nd(mask, {0, missing}).narrow(-1, 0, keys);
}

Rule attention_rule(Rows (*rows)(const Call&, int64_t), FindShapes shapes = {}) {
  Rule rule;
  rule.rows = rows;
  rule.takes_any_indices = true;
  rule.prepare = align_mask;
  rule.shapes = std::move(shapes);
  return rule;
}

std::vector<Sizes> attention_sizes(const Call& call) {
  const auto& query = call.operand(find_input(call, "query")).sizes;
  if (query.size() != 4) return {};
  return {query, {query[0], query[1], query[2]}};
}

const Registration kForCpu({"aten::_scaled_dot_product_flash_attention_for_cpu"},
                           attention_rule(attention_rows, attention_sizes));
const Registration kForCpuBackward({"aten::_scaled_dot_product_flash_attention_for_cpu_backward"},
                                   attention_rule(attention_backward_rows, sizes_of({1, 2, 3})));
const Registration kForCuda({"aten::_scaled_dot_product_flash_attention",
                             "aten::_scaled_dot_product_efficient_attention",
                             "aten::_scaled_dot_product_cudnn_attention"},
                            attention_rule(attention_rows));
const Registration kForCudaBackward({"aten::_scaled_dot_product_flash_attention_backward",
                                     "aten::_scaled_dot_product_efficient_attention_backward",
                                     "aten::_scaled_dot_product_cudnn_attention_backward"},
                                    attention_rule(attention_backward_rows));

}  // namespace
}  // namespace tessera::dtensor
