#include "compiler/kernels/row_plan.h"

#include "compiler/kernels/loop_nest.h"
#include "compiler/kernels/pointwise_rules.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

namespace tessera::compiler {
namespace {

constexpr RowReduction kReductions[] = {
    {"aten::sum.dim_IntList", "Sum", "0", false},
    {"aten::mean.dim", "Sum", "0", true},
    {"aten::amax", "Largest", "-INFINITY", false},
};

thread_local bool takes_host = false;

/// Whether `dims` names the last dimension alone.
bool is_last(const c10::IValue& dims, size_t rank) {
  if (!dims.isIntList() || dims.toIntList().size() != 1) return false;
  const int64_t dim = dims.toIntVector()[0];
  return dim == -1 || dim == static_cast<int64_t>(rank) - 1;
}

at::Tensor column_sums(const at::Tensor& self, int64_t parts) {
  const bool is_double = self.scalar_type() == at::kDouble;
  return self.reshape({parts, -1, self.size(-1)})
      .sum({1}, /*keepdim=*/false, is_double ? at::kDouble : at::kFloat);
}

std::vector<at::Tensor> sum_parts(at::TensorList parts) {
  std::vector<at::Tensor> sums;
  for (const auto& each : parts) sums.push_back(each.sum({0}));
  return sums;
}

std::vector<at::Tensor> casts(at::TensorList self, at::ScalarType dtype) {
  std::vector<at::Tensor> results;
  for (const auto& each : self) results.push_back(each.to(dtype, /*non_blocking=*/false, true));
  return results;
}

at::Tensor one_hot(const at::Tensor& self, int64_t classes) {
  return self == at::arange(classes, self.options());
}

/// Strides by dimension of `sizes`, to which the tensor is broadcast.
ValueType broadcast_to(const ValueType& type, const std::vector<int64_t>& sizes) {
  ValueType wide = type;
  wide.sizes = sizes;
  wide.strides.assign(sizes.size(), 0);
  const size_t missing = sizes.size() - type.sizes.size();
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    if (type.sizes[i] != 1) wide.strides[missing + i] = type.strides[i];
  }
  return wide;
}

class Planner {
 public:
  explicit Planner(const Graph& body)
      : body_(body), maker_(body.value_count(), kNone), level_(body.value_count(), 0) {
    for (size_t i = 0; i < body.nodes.size(); ++i) {
      for (const ValueId value : body.nodes[i].defined()) maker_[index(value)] = i;
    }
  }

  RowPlan plan() {
    find_shape();
    plan_.reads = lane_reads(body_, 0);
    for (const GraphOutput& output : body_.outputs) plan_.writes.push_back(output.value);
    lay_out();
    find_levels();
    plan_.phases.resize(1 + *std::max_element(level_.begin(), level_.end()));
    for (size_t i = 0; i < body_.nodes.size(); ++i) assign(i);
    for (size_t i = 0; i < plan_.writes.size(); ++i) assign_write(i);
    for (auto& phase : plan_.phases) collect(phase);
    return std::move(plan_);
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;
  static size_t index(ValueId value) { return static_cast<size_t>(value); }
  ValueId input_of(size_t node) const { return body_.nodes[node].arguments.at(0).values.at(0); }
  bool is_element(ValueId value) const { return body_.type(value).sizes == sizes_; }

  void find_shape() {
    for (const Node& node : body_.nodes) {
      if (!needs_rows(body_, node)) continue;
      sizes_ = shape_of_rows(body_, node);
      if (is_column_sums(node)) plan_.parts = node.arguments[1].constant.toInt();
    }
    plan_.columns = sizes_.back();
    plan_.rows = std::accumulate(sizes_.begin(), sizes_.end() - 1, int64_t{1}, std::multiplies<>());
  }

  void lay_out() {
    std::vector<ValueType> types;
    // First, since it decides the order of loops: rows in their order.
    ValueType order{.sizes = sizes_, .strides = std::vector<int64_t>(sizes_.size(), 1)};
    for (size_t i = sizes_.size() - 1; i-- > 0;)
      order.strides[i] = order.strides[i + 1] * sizes_[i + 1];
    types.push_back(order);
    std::vector<ValueId> tensors = plan_.reads;
    tensors.insert(tensors.end(), plan_.writes.begin(), plan_.writes.end());
    for (const ValueId value : tensors) {
      const size_t made = maker_[index(value)];
      const bool is_sums = made != kNone && is_column_sums(body_.nodes[made]);
      types.push_back(is_sums ? order : broadcast_to(body_.type(value), sizes_));
      plan_.along_row.push_back(types.back().strides.back());
    }
    std::vector<const ValueType*> of_rows;
    for (ValueType& type : types) {
      type.sizes.pop_back();
      type.strides.pop_back();
      of_rows.push_back(&type);
    }
    plan_.nest = nest_loops(types[0].sizes, of_rows);
    plan_.nest.strides.erase(plan_.nest.strides.begin());
  }

  void find_levels() {
    for (const Node& node : body_.nodes) {
      size_t level = 0;
      for (const ValueId value : node.used()) level = std::max(level, level_[index(value)]);
      if (row_reduction(body_, node) != nullptr) ++level;
      for (const ValueId value : node.defined()) level_[index(value)] = level;
    }
  }

  void assign(size_t i) {
    const Node& node = body_.nodes[i];
    const size_t level = level_[index(result_of(node, 0))];
    if (row_reduction(body_, node) != nullptr)
      plan_.phases[level - 1].reductions.push_back(i);
    else if (is_column_sums(node))
      plan_.phases[level].columns.push_back(i);
    else if (!is_element(result_of(node, 0)))
      plan_.phases[level].of_row.push_back(i);
  }

  void assign_write(size_t i) {
    const ValueId value = plan_.writes[i];
    if (is_column_sums(body_.nodes[maker_[index(value)]])) return;
    if (is_element(value))
      plan_.phases[level_[index(value)]].writes.push_back(i);
    else
      plan_.row_writes.push_back(i);
  }

  /// What the pass computes and reads for the sake of its results.
  void collect(RowPlan::Phase& phase) const {
    std::set<ValueId> wanted;
    for (const size_t node : phase.reductions) wanted.insert(input_of(node));
    for (const size_t node : phase.columns) wanted.insert(input_of(node));
    for (const size_t write : phase.writes) wanted.insert(plan_.writes[write]);
    for (size_t i = body_.nodes.size(); i-- > 0;) {
      const Node& node = body_.nodes[i];
      const ValueId result = result_of(node, 0);
      if (reduces(body_, node) || !is_element(result) || !wanted.contains(result)) continue;
      phase.of_elements.insert(phase.of_elements.begin(), i);
      if (is_one_hot(node)) continue;
      for (const size_t argument : arguments_read(*pointwise_rule(body_, node))) {
        const Operand operand = operand_of(body_, node, argument, 0);
        if (operand.kind == Operand::Kind::Value) wanted.insert(operand.value);
      }
    }
    for (size_t i = 0; i < plan_.reads.size(); ++i) {
      if (plan_.is_element_read(i) && wanted.contains(plan_.reads[i])) phase.reads.push_back(i);
    }
  }

  const Graph& body_;
  std::vector<size_t> maker_;  // by value: the node
  std::vector<size_t> level_;  // by value: the phase in which it is there
  std::vector<int64_t> sizes_;
  RowPlan plan_;
};

}  // namespace

const RowReduction* row_reduction(const Graph& graph, const Node& node) {
  const auto* found = std::ranges::find(kReductions, node.op, &RowReduction::op);
  if (found == std::end(kReductions) || node.arguments[0].kind != Argument::Kind::Value)
    return nullptr;
  const ValueType& from = graph.type(node.arguments[0].values[0]);
  const ValueType& to = graph.type(result_of(node, 0));
  if (from.sizes.empty() || !c10::isFloatingType(from.dtype) || !c10::isFloatingType(to.dtype))
    return nullptr;
  // Doubles are added as doubles, all others as floats.
  if ((from.dtype == at::kDouble) != (to.dtype == at::kDouble)) return nullptr;
  if (!is_last(node.arguments[1].constant, from.sizes.size())) return nullptr;
  const auto& keeps = node.arguments[2].constant;
  return keeps.isBool() && keeps.toBool() && to.is_contiguous() ? found : nullptr;
}

bool is_column_sums(const Node& node) { return node.op == kColumnSums; }

bool is_sum_parts(const Node& node) { return node.op == kSumParts; }

bool is_list_kernel(const Node& node) { return is_sum_parts(node) || node.op == kCasts; }

bool is_one_hot(const Node& node) { return node.op == kOneHot; }

bool reduces(const Graph& graph, const Node& node) {
  return is_column_sums(node) || row_reduction(graph, node) != nullptr;
}

bool needs_rows(const Graph& graph, const Node& node) {
  return is_one_hot(node) || reduces(graph, node);
}

const std::vector<int64_t>& shape_of_rows(const Graph& graph, const Node& node) {
  return graph.type(is_one_hot(node) ? result_of(node, 0) : node.arguments[0].values[0]).sizes;
}

RowsOnHost::RowsOnHost() : before_(std::exchange(takes_host, true)) {}
RowsOnHost::~RowsOnHost() { takes_host = before_; }

bool has_row_kernels(c10::Device device) {
  return device.is_cuda() || (takes_host && device.is_cpu());
}

bool is_kernel_row(const ValueType& type) {
  if (!has_row_kernels(type.device)) return false;
  if (!is_kernel_dtype(type.dtype) || type.sizes.empty() || type.numel() == 0 ||
      type.strides.size() != type.sizes.size())
    return false;
  // Shorter rows leave threads without work, and few long ones most of the GPU.
  constexpr int64_t kShortest = 32, kLong = 8192, kFewest = 64;
  const int64_t columns = type.sizes.back();
  return columns >= kShortest && (columns <= kLong || type.numel() / columns >= kFewest);
}

std::vector<int64_t> row_shape(std::vector<int64_t> sizes) {
  if (!sizes.empty()) sizes.back() = 1;
  return sizes;
}

bool has_rows(const Graph& body) {
  return std::any_of(body.nodes.begin(), body.nodes.end(),
                     [&](const Node& node) { return needs_rows(body, node); });
}

RowPlan plan_rows(const Graph& body) { return Planner(body).plan(); }

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("column_sums(Tensor self, int parts) -> Tensor", &column_sums);
  library.def("sum_parts(Tensor[] parts) -> Tensor[]", &sum_parts);
  library.def("casts(Tensor[] self, ScalarType dtype) -> Tensor[]", &casts);
  library.def("one_hot(Tensor self, int classes) -> Tensor", &one_hot);
}

}  // namespace tessera::compiler
