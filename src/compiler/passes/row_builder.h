#pragma once

#include "compiler/ir/memory.h"
#include "compiler/ir/rewrite.h"
#include "compiler/kernels/row_plan.h"

#include <string>
#include <unordered_set>
#include <vector>

namespace tessera::compiler {

/// What values of the dtype are added up in.
at::ScalarType sum_dtype(at::ScalarType dtype);

/// Writes a graph anew, node by node, with operators that kernels over rows hold in the place of
/// some. Results are contiguous, on `device_`.
class RowBuilder {
 public:
  explicit RowBuilder(Graph& graph);
  virtual ~RowBuilder() = default;
  RowBuilder(const RowBuilder&) = delete;
  RowBuilder& operator=(const RowBuilder&) = delete;

  void run();

 protected:
  /// Emits what the node is made of, and says what its results become; or leaves it as it is.
  virtual bool decompose(const Node& node) = 0;

  // What nodes say.
  static ValueId value_at(const Node& node, size_t argument);
  /// None if nobody uses it.
  ValueId result_at(const Node& node, size_t result) const;
  const ValueType& type(ValueId value) const { return graph_.type(value); }
  /// The node of the graph as it was that defines the value.
  const Node* maker_of(ValueId value) const;
  /// Whether somebody writes over it, so that it must not be read later.
  bool is_consumed(ValueId value) const;
  /// Whether kernels go over the rows of this value.
  bool has_rows(ValueId value) const;
  /// Whether the results are as what becomes of them is.
  bool are_plain(const Node& node) const;
  /// Through views that put leading dimensions together.
  ValueId before_views(ValueId value) const;

  // What they become.
  ValueId emit(const char* op, std::vector<Argument> arguments, at::ScalarType dtype,
               std::vector<int64_t> sizes);
  /// Not before it is needed: see Note [late].
  ValueId emit_late(const char* op, std::vector<Argument> arguments, at::ScalarType dtype,
                    std::vector<int64_t> sizes);
  void add_late(const char* op, std::vector<Argument> arguments);
  static Argument of(ValueId value) { return Argument::of(value); }
  template <class Constant>
  static Argument of(const Constant& constant) {
    return Argument::of(c10::IValue(constant));
  }
  /// Of `left`'s dtype and sizes.
  ValueId binary(const char* op, ValueId left, Argument right);
  ValueId add(ValueId a, ValueId b) { return binary("aten::add.Tensor", a, of(b)); }
  ValueId sub(ValueId a, ValueId b) { return binary("aten::sub.Tensor", a, of(b)); }
  ValueId mul(ValueId a, ValueId b) { return binary("aten::mul.Tensor", a, of(b)); }
  ValueId unary(const char* op, ValueId value);
  /// Of rows, to one number each.
  ValueId reduce(const char* op, ValueId value);
  ValueId mean(ValueId value) { return reduce("aten::mean.dim", value); }
  ValueId row_sum(ValueId value) { return reduce("aten::sum.dim_IntList", value); }
  ValueId cast(ValueId value, at::ScalarType dtype);
  /// As kernels compute it. What was widened before is widened again, from fewer bytes.
  ValueId wide(ValueId value) { return cast(wide_source(value), sum_dtype(type(value).dtype)); }
  /// What wide() casts.
  ValueId wide_source(ValueId value) const;
  bool has_columns(ValueId value) const;
  /// Over all dimensions but the last, as one dimension.
  ValueId column_sum(ValueId value);
  /// From here on `result` is `value`; what stands for it is returned.
  ValueId become(ValueId result, ValueId value);

  Graph& graph_;
  c10::Device device_ = at::kCPU;  // of what is emitted

 private:
  struct Sums {
    ValueId parts, result;
  };
  static size_t index(ValueId value) { return static_cast<size_t>(value); }
  ValueId add_value(at::ScalarType dtype, std::vector<int64_t> sizes);
  void add_node(Node node, bool is_late);
  bool uses_late(const Node& node) const;
  void move_behind(ValueId value);
  void flush();

  const MemoryAnalysis memory_;           // of the graph as it was
  const size_t values_;                   // how many it had
  std::unordered_set<ValueId> consumed_;  // of those that came later
  std::vector<const Node*> made_by_;      // by value of the graph as it was
  std::vector<Node> nodes_;
  std::vector<Node> late_;
  std::vector<Sums> late_sums_;  // before them
  std::unordered_set<ValueId> late_values_;
  Replacements replacements_;
  std::string module_;
};

}  // namespace tessera::compiler
