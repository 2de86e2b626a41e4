#include "compiler/codegen/emit.h"

#include "comm/dtype_names.h"
#include "compiler/codegen/expression.h"
#include "compiler/codegen/kernel.h"
#include "compiler/codegen/lifetimes.h"
#include "compiler/codegen/names.h"
#include "compiler/codegen/prelude.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"

#include <c10/util/StringUtil.h>

#include <unordered_map>

namespace tessera::compiler {
namespace {

class Emitter {
 public:
  explicit Emitter(const Graph& graph)
      : graph_(graph), names_(name_values(graph)), targets_(in_place_targets(graph)) {}

  std::string emit() {
    program();
    // In a namespace of its own, where a value may be called "exp".
    return prelude_for(kernels_) + kernels_ + "\nnamespace program {\n\n" + values() + "\n" +
           program_ + "\n}  // namespace program\n";
  }

 private:
  const std::string& name(ValueId value) const { return names_.at(static_cast<size_t>(value)); }

  /// One line per value: its name, number and type.
  std::string values() const {
    std::string text = "enum Value : int {\n";
    const auto define = [&](ValueId value, const std::string& note) {
      text += "  " + name(value) + " = " + std::to_string(value) + ",  // " +
              text_of(graph_.type(value)) + note + "\n";
    };
    for (const GraphInput& input : graph_.inputs) {
      define(input.value, ", " + std::string(name_of(input.kind)) + " " + quote(input.name));
    }
    for (const Node& node : graph_.nodes) {
      for (const ValueId value : node.defined()) define(value, "");
    }
    return text + "};\n";
  }

  void program() {
    program_ =
        "extern \"C\" UNOPTIMISED void tessera_program(const ProgramInterface* api, Frame* frame) "
        "{\n"
        "  const Tessera tessera{api, frame};\n";
    const auto ends = last_uses(graph_);
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      if (node.op == kFused) {
        call_kernel(node);
      } else {
        line("// " + results(node) + call_text(node, names_));
        line("tessera.call(" + std::to_string(i) + ");");
      }
      drop(ends[i]);
    }
    outputs();
    program_ += "}\n";
  }

  std::string results(const Node& node) const {
    std::string text;
    for (const ValueId value : node.defined()) text += (text.empty() ? "" : ", ") + name(value);
    return text.empty() ? text : text + " = ";
  }

  void call_kernel(const Node& node) {
    const Graph& body = *node.body;
    const auto used = node.used();
    const auto defined = node.defined();
    auto inner = name_values(body);
    for (size_t i = 0; i < body.inputs.size(); ++i)
      inner.at(static_cast<size_t>(body.inputs[i].value)) = name(used.at(i));
    for (size_t i = 0; i < body.outputs.size(); ++i)
      inner.at(static_cast<size_t>(body.outputs[i].value)) = name(defined.at(i));
    for (const Node& each : body.nodes)
      line("// " + definition(each, inner) + call_text(each, inner));

    const Kernel kernel = write_kernel(body);
    for (const ValueId value : defined) make(value);
    std::string call = kernel_name(kernel) + "(tessera";
    for (const size_t input : kernel.inputs) {
      const ValueId value = used.at(input);
      call +=
          ", tessera.at<const " + memory_type(graph_.type(value).dtype) + ">(" + name(value) + ")";
    }
    for (const ValueId value : defined)
      call += ", tessera.at<" + memory_type(graph_.type(value).dtype) + ">(" + name(value) + ")";
    line(call + ");");
  }

  static std::string definition(const Node& node, const std::vector<std::string>& names) {
    std::string text;
    for (const ValueId value : node.defined())
      text += (text.empty() ? "" : ", ") + names.at(static_cast<size_t>(value));
    return text + " = ";
  }

  void make(ValueId value) {
    const ValueId target = targets_.at(static_cast<size_t>(value));
    if (target == kNoValue) {
      line("tessera.make(" + name(value) + ");");
    } else {
      line("tessera.make_in_place(" + name(value) + ", " + name(target) + ");");
    }
  }

  /// Kernels of the same text are one function.
  std::string kernel_name(const Kernel& kernel) {
    auto& known = kernel_names_[kernel.operators + kernel.text];
    if (known.empty()) {
      known = kKernelPrefix + kernel.operators + "_" + std::to_string(kernel_names_.size() - 1);
      kernels_ += "\n";
      for (const char character : kernel.text)
        kernels_ += character == kKernelName ? known : std::string(1, character);
    }
    return known;
  }

  void drop(const std::vector<ValueId>& values) {
    std::string text;
    for (const ValueId value : values)
      text += c10::str(text.empty() ? "" : " ", "tessera.drop(", name(value), ");");
    if (!text.empty()) line(text);
  }

  void outputs() {
    for (size_t i = 0; i < graph_.outputs.size(); ++i) {
      const GraphOutput& output = graph_.outputs[i];
      if (output.value == kNoValue) continue;
      switch (output.kind) {
        case OutputKind::Result:
          line("// return " + name(output.value));
          break;
        case OutputKind::Gradient:
          line("// " + name(output.target) + ".grad = " + name(output.value));
          break;
        case OutputKind::Write:
          line("// aten.copy_.default(" + name(output.target) + ", " + name(output.value) + ")");
          break;
      }
      line("tessera.deliver(" + std::to_string(i) + ");");
    }
  }

  void line(const std::string& text) { program_ += "  " + text + "\n"; }

  const Graph& graph_;
  const std::vector<std::string> names_;
  const std::vector<ValueId> targets_;
  std::unordered_map<std::string, std::string> kernel_names_;  // by operators and text
  std::string kernels_;
  std::string program_;
};

}  // namespace

std::string emit(const Graph& graph) { return Emitter(graph).emit(); }

}  // namespace tessera::compiler
