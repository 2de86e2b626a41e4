#include "compiler/runtime/listing.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"
#include "compiler/kernels/in_place.h"
#include "compiler/kernels/kernels.h"
#include "compiler/kernels/names.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

class Listing {
 public:
  explicit Listing(const Graph& graph)
      : graph_(graph),
        kernels_(write_kernels(graph)),
        names_(name_values(graph)),
        in_place_(in_place_targets(graph)) {}

  std::string write() {
    text_ = kernels_.text();
    text_ += "program(\n";
    for (const GraphInput& input : graph_.inputs)
      line(name(input.value) + ",  // " + text_of(graph_.type(input.value)) + ", " +
           std::string(name_of(input.kind)) + " " + quote(input.name));
    text_ += ") {\n";
    const auto freed = last_uses(graph_);
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      kernels_.uses[i] ? add_kernel(i) : add_call(graph_.nodes[i]);
      if (!freed[i].empty()) line("free(" + names_of(freed[i]) + ")");
    }
    add_outputs();
    return text_ + "}\n";
  }

 private:
  const std::string& name(ValueId value) const { return names_.at(static_cast<size_t>(value)); }

  std::string names_of(const std::vector<ValueId>& values) const {
    std::string text;
    for (const ValueId value : values) text += (text.empty() ? "" : ", ") + name(value);
    return text;
  }

  std::string note_of(const std::vector<ValueId>& values) const {
    std::string text;
    for (const ValueId value : values)
      text += (text.empty() ? "  // " : ", ") + text_of(graph_.type(value));
    return text;
  }

  void add_call(const Node& node) {
    const auto defined = node.defined();
    line((defined.empty() ? "" : names_of(defined) + " = ") + call_text(node, names_) +
         note_of(defined));
  }

  /// What it computes, operator by operator, and the call.
  void add_kernel(size_t at) {
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
      line("// " + results + " = " + call_text(each, inner));
    }
    std::string arguments;
    for (const size_t input : kernels_.uses[at]->kernel.inputs)
      arguments += (arguments.empty() ? "" : ", ") + name(used.at(input));
    for (const ValueId value : defined) {
      const ValueId target = in_place_.at(static_cast<size_t>(value));
      arguments += (arguments.empty() ? "" : ", ") + std::string("out ") + name(value) +
                   (target == kNoValue ? "" : " in place of " + name(target));
    }
    line(kernels_.uses[at]->name + "(" + arguments + ")" + note_of(defined));
  }

  void add_outputs() {
    for (const GraphOutput& output : graph_.outputs) {
      if (output.kind == OutputKind::Result && output.value != kNoValue)
        line("return " + name(output.value));
      if (output.kind == OutputKind::Gradient)
        line(name(output.target) +
             ".grad = " + (output.value == kNoValue ? "None" : name(output.value)));
      if (output.kind == OutputKind::Write && output.value != kNoValue &&
          in_place_.at(static_cast<size_t>(output.value)) != output.target)
        line("aten.copy_.default(" + name(output.target) + ", " + name(output.value) + ")");
    }
  }

  void line(const std::string& text) { text_ += "  " + text + "\n"; }

  const Graph& graph_;
  const KernelSources kernels_;
  const std::vector<std::string> names_;
  const std::vector<ValueId> in_place_;
  std::string text_;
};

}  // namespace

std::string program_text(const Graph& graph) { return Listing(graph).write(); }

}  // namespace tessera::compiler
