#include "compiler/passes/row_builder.h"

#include "compiler/ir/operators.h"
#include "compiler/kernels/pointwise_rules.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <iterator>
#include <map>

namespace tessera::compiler {
namespace {

/// How many parts of rows are added up apart from each other: about as many as a GPU has at once.
/// 0: none that divide them evenly.
int64_t parts_of(int64_t rows) {
  constexpr int64_t kMost = 528, kFewest = 32, kRows = 4;
  for (int64_t parts = std::min(kMost, rows / kRows); parts >= kFewest; --parts) {
    if (rows % parts == 0) return parts;
  }
  return 0;
}

}  // namespace

at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

RowBuilder::RowBuilder(Graph& graph)
    : graph_(graph),
      memory_(graph),
      values_(graph.value_count()),
      made_by_(graph.value_count(), nullptr) {}

void RowBuilder::run() {
  const auto old = std::move(graph_.nodes);
  for (const Node& node : old) {
    for (const ValueId value : node.defined()) made_by_.at(index(value)) = &node;
  }
  for (const Node& original : old) {
    Node node = original;
    replace_uses(node, replacements_);
    module_ = node.module;
    if (uses_late(node) && is_view(node) && !is_wait(node)) {
      add_node(std::move(node), /*is_late=*/true);
      continue;
    }
    if (uses_late(node) || node.op == kNextIteration) flush();
    if (!decompose(node)) nodes_.push_back(std::move(node));
  }
  flush();
  graph_.nodes = std::move(nodes_);
  replace_uses(graph_, replacements_);
  if (!replacements_.empty()) remove_dead_code(graph_);
}

ValueId RowBuilder::value_at(const Node& node, size_t argument) {
  const Argument& given = node.arguments.at(argument);
  return given.kind == Argument::Kind::Value ? given.values.at(0) : kNoValue;
}

ValueId RowBuilder::result_at(const Node& node, size_t result) const {
  const ValueId value = result < node.results.size() ? node.results[result].values.at(0) : kNoValue;
  return value == kNoValue || memory_.uses().users(value).empty() ? kNoValue : value;
}

const Node* RowBuilder::maker_of(ValueId value) const {
  return value == kNoValue || index(value) >= values_ ? nullptr : made_by_[index(value)];
}

bool RowBuilder::is_consumed(ValueId value) const {
  return consumed_.contains(value) || (index(value) < values_ && memory_.is_consumed(value));
}

bool RowBuilder::has_rows(ValueId value) const {
  return value != kNoValue && is_kernel_row(type(value)) && type(value).is_contiguous() &&
         c10::isFloatingType(type(value).dtype);
}

bool RowBuilder::are_plain(const Node& node) const {
  const auto values = node.defined();
  return std::all_of(values.begin(), values.end(),
                     [&](ValueId value) { return type(value).is_contiguous(); });
}

ValueId RowBuilder::before_views(ValueId value) const {
  for (;;) {
    const Node* maker = maker_of(value);
    if (maker == nullptr || !views_from_start(*maker)) return value;
    const ValueId from = resolve(replacements_, value_at(*maker, 0));
    if (from == kNoValue || !type(from).is_contiguous() || !type(value).is_contiguous() ||
        type(from).dtype != type(value).dtype || type(from).sizes.empty() ||
        type(value).sizes.empty() || type(from).sizes.back() != type(value).sizes.back() ||
        type(from).numel() != type(value).numel() || is_consumed(from))
      return value;
    value = from;
  }
}

ValueId RowBuilder::add_value(at::ScalarType dtype, std::vector<int64_t> sizes) {
  const std::vector<int64_t> ones(sizes.size(), 1);
  ValueType result{.dtype = dtype, .device = device_, .sizes = std::move(sizes), .strides = ones};
  for (size_t i = result.sizes.size(); i-- > 1;)
    result.strides[i - 1] = result.strides[i] * std::max<int64_t>(result.sizes[i], 1);
  return graph_.add_value(std::move(result));
}

ValueId RowBuilder::emit(const char* op, std::vector<Argument> arguments, at::ScalarType dtype,
                         std::vector<int64_t> sizes) {
  const ValueId value = add_value(dtype, std::move(sizes));
  add_node(make_node(op, std::move(arguments), {Argument::of(value)}), /*is_late=*/false);
  return value;
}

// Note [late]
// A kernel stands where the last of its operators stood, so nothing that is no part of it may use
// its results before. Sums of parts of columns, and a loss of all rows, need not come before
// somebody else asks for them: they wait, so that more operators join the kernel.

ValueId RowBuilder::emit_late(const char* op, std::vector<Argument> arguments, at::ScalarType dtype,
                              std::vector<int64_t> sizes) {
  const ValueId value = add_value(dtype, std::move(sizes));
  add_node(make_node(op, std::move(arguments), {Argument::of(value)}), /*is_late=*/true);
  return value;
}

void RowBuilder::add_late(const char* op, std::vector<Argument> arguments) {
  add_node(make_node(op, std::move(arguments), {}), /*is_late=*/true);
}

void RowBuilder::add_node(Node node, bool is_late) {
  node.module = module_;
  if (!is_late && !uses_late(node)) return nodes_.push_back(std::move(node));
  for (const ValueId value : node.defined()) late_values_.insert(value);
  late_.push_back(std::move(node));
}

bool RowBuilder::uses_late(const Node& node) const {
  const auto values = node.used();
  return std::any_of(values.begin(), values.end(),
                     [&](ValueId value) { return late_values_.contains(value); });
}

void RowBuilder::flush() {
  std::map<std::pair<at::ScalarType, std::string>, std::vector<Sums>> by_type;
  for (const Sums& sums : late_sums_)
    by_type[{type(sums.result).dtype, type(sums.result).device.str()}].push_back(sums);
  late_sums_.clear();
  for (const auto& [key, all] : by_type) {
    for (size_t begin = 0; begin < all.size(); begin += kMostOfList) {
      std::vector<ValueId> parts, results;
      for (size_t i = begin; i < std::min(begin + kMostOfList, all.size()); ++i) {
        parts.push_back(all[i].parts);
        results.push_back(all[i].result);
      }
      nodes_.push_back(make_node(kSumParts, {Argument::of(parts)}, {Argument::of(results)}));
    }
  }
  std::move(late_.begin(), late_.end(), std::back_inserter(nodes_));
  late_.clear();
  late_values_.clear();
}

/// Moves the node that was added last to where what it reads is made: nothing that uses that value
/// stands between the two then.
void RowBuilder::move_behind(ValueId value) {
  for (size_t i = nodes_.size() - 1; i-- > 0;) {
    const auto defined = nodes_[i].defined();
    if (std::find(defined.begin(), defined.end(), value) == defined.end()) continue;
    std::rotate(nodes_.begin() + static_cast<long>(i) + 1, nodes_.end() - 1, nodes_.end());
    return;
  }
}

ValueId RowBuilder::binary(const char* op, ValueId left, Argument right) {
  const ValueType result = type(left);
  return emit(op, {of(left), std::move(right)}, result.dtype, result.sizes);
}

ValueId RowBuilder::unary(const char* op, ValueId value) {
  const ValueType result = type(value);
  return emit(op, {of(value)}, result.dtype, result.sizes);
}

ValueId RowBuilder::reduce(const char* op, ValueId value) {
  const ValueType from = type(value);
  return emit(op, {of(value), of(std::vector<int64_t>{-1}), of(true)}, from.dtype,
              row_shape(from.sizes));
}

ValueId RowBuilder::cast(ValueId value, at::ScalarType dtype) {
  if (type(value).dtype == dtype) return value;
  return emit("aten::_to_copy", {of(value), of(static_cast<int64_t>(dtype))}, dtype,
              type(value).sizes);
}

ValueId RowBuilder::wide_source(ValueId value) const {
  const auto dtype = sum_dtype(type(value).dtype);
  const Node* maker = maker_of(value);
  if (maker == nullptr || !is_copy(*maker)) return value;
  const ValueId from = resolve(replacements_, value_at(*maker, 0));
  const bool is_widened = has_rows(from) && is_half(type(from).dtype) &&
                          type(from).sizes == type(value).sizes && type(value).dtype == dtype &&
                          type(from).device == type(value).device && !is_consumed(from);
  return is_widened ? from : value;
}

bool RowBuilder::has_columns(ValueId value) const {
  return has_rows(value) && type(value).sizes.back() <= kMostColumnSums &&
         parts_of(type(value).numel() / type(value).sizes.back()) > 0;
}

ValueId RowBuilder::column_sum(ValueId value) {
  const int64_t columns = type(value).sizes.back();
  const auto dtype = sum_dtype(type(value).dtype);
  if (!has_columns(value)) {
    std::vector<int64_t> leading(type(value).sizes.size() - 1);
    for (size_t i = 0; i < leading.size(); ++i) leading[i] = static_cast<int64_t>(i);
    if (leading.empty()) return unary("aten::clone", cast(value, dtype));
    return emit("aten::sum.dim_IntList",
                {of(value), of(leading), of(false), of(static_cast<int64_t>(dtype))}, dtype,
                {columns});
  }
  const int64_t parts = parts_of(type(value).numel() / columns);
  const ValueId sums = emit(kColumnSums, {of(value), of(parts)}, dtype, {parts, columns});
  if (!late_values_.contains(sums)) move_behind(value);
  const ValueId result = add_value(dtype, {columns});
  late_values_.insert(result);
  late_sums_.push_back({sums, result});
  return result;
}

ValueId RowBuilder::become(ValueId result, ValueId value) {
  if (result == kNoValue) return kNoValue;
  value = cast(value, type(result).dtype);
  graph_.type(value).placement = type(result).placement;
  if (is_consumed(result)) consumed_.insert(value);
  return replacements_[result] = value;
}

}  // namespace tessera::compiler
