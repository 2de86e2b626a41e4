#include "compiler/runtime/listing.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"
#include "compiler/kernels/in_place.h"
#include "compiler/kernels/names.h"

#include <algorithm>

namespace tessera::compiler {

Listing::Listing(const Graph& graph)
    : graph_(graph),
      kernels_(write_kernels(graph)),
      names_(name_values(graph)),
      in_place_(in_place_targets(graph)) {}

std::string Listing::text() const {
  std::string text = kernels_.text();
  const auto add = [&](const std::string& line) { text += "  " + line + "\n"; };
  text += "program(\n";
  for (const GraphInput& input : graph_.inputs)
    add(name(input.value) + ",  // " + text_of(graph_.type(input.value)) + ", " +
        std::string(name_of(input.kind)) + " " + quote(input.name));
  text += ") {\n";
  const auto freed = last_uses(graph_);
  for (size_t i = 0; i < graph_.nodes.size(); ++i) {
    const auto [operators, call] = instruction(i);
    for (const auto& each : operators) add("// " + each);
    add(call);
    if (!freed[i].empty()) add("free(" + names_of(freed[i]) + ")");
  }
  for (const auto& line : outputs()) add(line);
  return text + "}\n";
}

Listing::Line Listing::instruction(size_t node) const {
  if (kernels_.uses[node]) return kernel_line(node);
  const auto defined = graph_.nodes[node].defined();
  return {.operators = {},
          .call = (defined.empty() ? "" : names_of(defined) + " = ") +
                  call_text(graph_.nodes[node], names_) + note_of(defined)};
}

Listing::Line Listing::kernel_line(size_t at) const {
  Line line;
  const Node& node = graph_.nodes[at];
  const Graph& body = *node.body;
  const auto used = node.used(), defined = node.defined();
  auto inner = name_values(body);
  for (size_t i = 0; i < body.inputs.size(); ++i)
    inner.at(static_cast<size_t>(body.inputs[i].value)) = name(used.at(i));
  for (size_t i = 0; i < body.outputs.size(); ++i)
    inner.at(static_cast<size_t>(body.outputs[i].value)) = name(defined.at(i));
  for (const Node& each : body.nodes) {
    std::string results;
    for (const ValueId value : each.defined())
      results += (results.empty() ? "" : ", ") + inner.at(static_cast<size_t>(value));
    line.operators.push_back(results + " = " + call_text(each, inner));
  }
  std::string arguments;
  for (const size_t input : kernels_.uses[at]->kernel.inputs)
    arguments += (arguments.empty() ? "" : ", ") + name(used.at(input));
  for (const ValueId value : defined) {
    const ValueId target = in_place_.at(static_cast<size_t>(value));
    arguments += (arguments.empty() ? "" : ", ") + std::string("out ") + name(value) +
                 (target == kNoValue ? "" : " in place of " + name(target));
  }
  line.call = kernels_.uses[at]->name + "(" + arguments + ")" + note_of(defined);
  return line;
}

std::vector<std::string> Listing::outputs() const {
  std::vector<std::string> lines;
  for (const GraphOutput& output : graph_.outputs) {
    if (output.kind == OutputKind::Result && output.value != kNoValue)
      lines.push_back("return " + name(output.value));
    if (output.kind == OutputKind::Gradient)
      lines.push_back(name(output.target) +
                      ".grad = " + (output.value == kNoValue ? "None" : name(output.value)));
    if (output.kind == OutputKind::Write && output.value != kNoValue &&
        in_place_.at(static_cast<size_t>(output.value)) != output.target)
      lines.push_back("aten.copy_.default(" + name(output.target) + ", " + name(output.value) +
                      ")");
  }
  return lines;
}

std::string Listing::names_of(const std::vector<ValueId>& values) const {
  std::string text;
  for (const ValueId value : values) text += (text.empty() ? "" : ", ") + name(value);
  return text;
}

std::string Listing::note_of(const std::vector<ValueId>& values) const {
  std::string text;
  for (const ValueId value : values)
    text += (text.empty() ? "  // " : ", ") + text_of(graph_.type(value));
  return text;
}

std::string program_text(const Graph& graph) { return Listing(graph).text(); }

}  // namespace tessera::compiler
