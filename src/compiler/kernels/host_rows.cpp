#include "compiler/kernels/expression.h"
#include "compiler/kernels/kernel.h"
#include "compiler/kernels/row_text.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

// Of a row at once, each added to a sum of its own: a vector, or two. across() knows of it.
constexpr int64_t kLanes = 16;

/// Writes a kernel over rows: threads take rows, or parts of column_sums.
class HostRows : RowText {
 public:
  using RowText::RowText;

  std::string write(const std::vector<size_t>& inputs) {
    text_ = host_head(body_, inputs);
    const int64_t units = plan_.parts > 0 ? plan_.parts : plan_.rows;
    const int64_t elements = plan_.rows * plan_.columns;
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements / units));
    open("host.parallel(" + std::to_string(units) + ", " + std::to_string(grain) +
         ", [=](int64_t begin, int64_t end) {");
    if (plan_.parts > 0) {
      const std::string rows = std::to_string(plan_.rows / plan_.parts);
      open("for (int64_t part = begin; part < end; ++part) {");
      columns_begin();
      open("for (int64_t row = part * " + rows + "; row < (part + 1) * " + rows + "; ++row) {");
    } else {
      open("for (int64_t row = begin; row < end; ++row) {");
    }
    row();
    close();
    if (plan_.parts > 0) close();
    close("});");
    text_ += "}\n";
    return std::move(text_);
  }

 private:
  std::string column() const override { return "at"; }
  std::string hot_column(size_t node) const override { return input_of(node); }

  void columns_begin() {
    for (const auto& phase : plan_.phases) {
      for (const size_t node : phase.columns) {
        const std::string columns = std::to_string(plan_.columns);
        const auto sums = c10::str("c", node);
        line(sum_type(node) + "* const " + sums + " = out" + std::to_string(write_of(node)) +
             " + part * " + columns + ";");
        line("for (int64_t at = 0; at < " + columns + "; ++at) " + sums + "[at] = 0;");
      }
    }
  }

  void row() {
    row_counters("int64_t");
    row_loads();
    for (const auto& phase : plan_.phases) {
      for (const size_t node : phase.of_row) line(statement(node));
      if (phase.is_pass()) pass(phase);
      for (const size_t node : phase.reductions)
        line(reduced(node, std::string("across<") + reduction(node).combine + ">(r" +
                               std::to_string(node) + ")"));
    }
    for (const size_t write : plan_.row_writes)
      line("out" + std::to_string(write) + "[" + number_place(tensor_of_write(write)) +
           "] = " + store_text(variable_of(plan_.writes[write]), type_of_write(write).dtype) + ";");
  }

  void pass(const RowPlan::Phase& phase) {
    const std::string lanes = std::to_string(kLanes);
    for (const size_t node : phase.reductions) {
      const std::string sums = "r" + std::to_string(node);
      line(sum_type(node) + " " + sums + "[" + lanes + "];");
      line("for (int v = 0; v < " + lanes + "; ++v) " + sums + "[v] = " + reduction(node).identity +
           ";");
    }
    const int64_t rest = plan_.columns % kLanes;
    const std::string whole = std::to_string(plan_.columns - rest);
    if (rest != plan_.columns) {
      open("for (int64_t first = 0; first < " + whole + "; first += " + lanes + ") {");
      elements(phase, "first", lanes);
      close();
    }
    if (rest != 0) elements(phase, whole, std::to_string(rest));
  }

  void elements(const RowPlan::Phase& phase, const std::string& first, const std::string& count) {
    line("INDEPENDENT");
    open("for (int v = 0; v < " + count + "; ++v) {");
    line("const int64_t at = " + first + " + v;");
    for (const size_t read : phase.reads)
      load(read, "in" + std::to_string(read) + "[" + place(read, "at") + "]");
    for (const size_t node : phase.of_elements) line(statement(node));
    for (const size_t node : phase.reductions) {
      const std::string sum = "r" + std::to_string(node) + "[v]";
      line(sum + " = " + reduction(node).combine + "::of(" + sum + ", " + sum_type(node) + "(" +
           input_of(node) + "));");
    }
    for (const size_t node : phase.columns)
      line("c" + std::to_string(node) + "[at] += " + input_of(node) + ";  // tessera.column_sums");
    for (const size_t write : phase.writes)
      line("out" + std::to_string(write) + "[" + place(tensor_of_write(write), "at") +
           "] = " + store_text(variable_of(plan_.writes[write]), type_of_write(write).dtype) + ";");
    close();
  }
};

}  // namespace

std::string write_host_rows(const Graph& body, const std::vector<std::string>& names,
                            const std::vector<size_t>& inputs) {
  const RowPlan plan = plan_rows(body);
  return HostRows(body, names, plan).write(inputs);
}

}  // namespace tessera::compiler
