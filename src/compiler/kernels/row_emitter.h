#pragma once

#include "compiler/kernels/row_plan.h"

#include <string>
#include <vector>

namespace tessera::compiler {

/// What the text of a kernel over rows is on any target: in0, in1 ... are what it reads, out0 ...
/// what it writes, x0 ... numbers of what it reads, r0 ... what reductions have so far.
class RowEmitter {
 public:
  RowEmitter(const Graph& body, const std::vector<std::string>& names, const RowPlan& plan)
      : body_(body), names_(names), plan_(plan) {}
  virtual ~RowEmitter() = default;

 protected:
  /// Of the element at hand, and the one where one_hot is true.
  virtual std::string column() const = 0;
  virtual std::string hot_column(size_t node) const = 0;

  /// "const float sub = x0 - mean;  // aten.sub.Tensor"
  std::string statement(size_t node) const;
  /// "const float mean = r0 / 768.0f;  // aten.mean.dim"
  std::string reduced(size_t node, const std::string& from) const;
  const RowReduction& reduction(size_t node) const;
  /// What a reduction adds up in.
  std::string sum_type(size_t node) const;
  /// The variable that holds what a reduction or a sum of columns takes, "x0" or a result.
  std::string input_of(size_t node) const;
  std::string variable_of(ValueId value) const;
  size_t write_of(size_t node) const;

  /// Which turn of each loop over rows `row` is.
  void row_counters(const std::string& type);
  /// The index of the row's first element, "i0 * 768 + ", or "".
  std::string row_place(size_t tensor) const;
  /// That of the element `at` of the row.
  std::string place(size_t tensor, const std::string& at) const;
  std::string number_place(size_t tensor) const;  // of one number per row
  size_t tensor_of_write(size_t write) const { return plan_.reads.size() + write; }

  const ValueType& type_of_read(size_t read) const { return body_.type(plan_.reads[read]); }
  const ValueType& type_of_write(size_t write) const { return body_.type(plan_.writes[write]); }
  /// "const float x0 = load(FROM);"
  void load(size_t read, const std::string& from);
  void row_loads();
  void line(const std::string& text) { text_ += std::string(2 * depth_, ' ') + text + "\n"; }
  void open(const std::string& text) {
    line(text);
    ++depth_;
  }
  void close(const std::string& text = "}") {
    --depth_;
    line(text);
  }

  const Graph& body_;
  const std::vector<std::string>& names_;
  const RowPlan& plan_;
  std::string text_;
  size_t depth_ = 1;
};

}  // namespace tessera::compiler
