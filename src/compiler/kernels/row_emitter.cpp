#include "compiler/kernels/row_emitter.h"

#include "compiler/kernels/names.h"
#include "compiler/kernels/pointwise_rules.h"

#include <algorithm>

namespace tessera::compiler {

std::string RowEmitter::variable_of(ValueId value) const {
  const auto read = std::find(plan_.reads.begin(), plan_.reads.end(), value);
  if (read != plan_.reads.end()) return "x" + std::to_string(read - plan_.reads.begin());
  return names_.at(static_cast<size_t>(value));
}

std::string RowEmitter::statement(size_t at) const {
  const Node& node = body_.nodes[at];
  const ValueId result = result_of(node, 0);
  const auto name_of = [this](const Operand& operand) { return variable_of(operand.value); };
  const auto& sizes = body_.type(result).sizes;
  const bool is_of_row = sizes.empty() || sizes.back() != plan_.columns;
  const std::string place =
      is_of_row ? "row" : "row * " + std::to_string(plan_.columns) + " + " + column();
  const std::string expression =
      is_one_hot(node)
          ? hot_column(at) + " == " + column()
          : expression_text(body_, node, 0, *pointwise_rule(body_, node), name_of, place);
  return "const " + register_type(body_.type(result).dtype) + " " + variable_of(result) + " = " +
         expression + ";  // " + python_name(node.op);
}

const RowReduction& RowEmitter::reduction(size_t node) const {
  return *row_reduction(body_, body_.nodes[node]);
}

std::string RowEmitter::sum_type(size_t node) const {
  const ValueId input = body_.nodes[node].arguments[0].values[0];
  return body_.type(input).dtype == at::kDouble ? "double" : "float";
}

std::string RowEmitter::input_of(size_t node) const {
  return variable_of(body_.nodes[node].arguments[0].values[0]);
}

std::string RowEmitter::reduced(size_t at, const std::string& from) const {
  const Node& node = body_.nodes[at];
  const ValueId result = result_of(node, 0);
  const auto dtype = body_.type(result).dtype;
  std::string number = from;
  if (reduction(at).is_mean) number += " / " + std::to_string(plan_.columns);
  if (is_narrow(dtype)) number = "rounded<" + memory_type(dtype) + ">(" + number + ")";
  return "const " + register_type(dtype) + " " + variable_of(result) + " = " + number + ";  // " +
         python_name(node.op);
}

size_t RowEmitter::write_of(size_t node) const {
  const ValueId result = result_of(body_.nodes[node], 0);
  return static_cast<size_t>(std::find(plan_.writes.begin(), plan_.writes.end(), result) -
                             plan_.writes.begin());
}

void RowEmitter::row_counters(const std::string& type) {
  const auto& sizes = plan_.nest.sizes;
  std::string rest = "row";
  for (size_t loop = sizes.size(); loop-- > 0;) {
    const std::string turns = std::to_string(sizes[loop]);
    line("const " + type + " i" + std::to_string(loop) + " = " +
         (loop == 0 ? rest : rest + " % " + turns) + ";");
    rest = loop + 1 == sizes.size() ? "row / " + turns : "(" + rest + ") / " + turns;
  }
}

std::string RowEmitter::row_place(size_t tensor) const {
  std::string text;
  const auto& strides = plan_.nest.strides[tensor];
  for (size_t loop = 0; loop < strides.size(); ++loop) {
    if (strides[loop] == 0) continue;
    text += "i" + std::to_string(loop);
    if (strides[loop] != 1) text += " * " + std::to_string(strides[loop]);
    text += " + ";
  }
  return text;
}

std::string RowEmitter::place(size_t tensor, const std::string& at) const {
  const int64_t stride = plan_.along_row[tensor];
  return row_place(tensor) + at + (stride == 1 ? "" : " * int64_t{" + std::to_string(stride) + "}");
}

std::string RowEmitter::number_place(size_t tensor) const { return row_place(tensor) + "0"; }

void RowEmitter::load(size_t read, const std::string& from) {
  const auto dtype = type_of_read(read).dtype;
  line("const " + register_type(dtype) + " x" + std::to_string(read) + " = " +
       load_text(from, dtype) + ";");
}

void RowEmitter::row_loads() {
  for (size_t i = 0; i < plan_.reads.size(); ++i) {
    if (!plan_.is_element_read(i)) load(i, "in" + std::to_string(i) + "[" + number_place(i) + "]");
  }
}

}  // namespace tessera::compiler
