#include "compiler/runtime/listing.h"

#include <tessera/compile/layout.h>

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"
#include "compiler/ir/verify.h"
#include "compiler/kernels/buffers.h"
#include "compiler/kernels/names.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

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

namespace tessera {
namespace compiler {
namespace {

class LayoutBuilder {
 public:
  explicit LayoutBuilder(const Graph& graph)
      : graph_(graph), listing_(graph), lifetimes_(lifetimes_of(graph, listing_.in_place())) {}

  ProgramLayout build() {
    add_buffers();
    for (size_t i = 0; i < graph_.nodes.size(); ++i) add_instruction(i);
    layout_.outputs = listing_.outputs();
    layout_.devices.assign(devices_.begin(), devices_.end());
    for (const auto& buffer : layout_.buffers) {
      if (buffer.is_input) layout_.input_bytes = add_bytes(layout_.input_bytes, buffer.bytes);
    }
    layout_.peak = lifetimes_.peak;
    layout_.peak_bytes = lifetimes_.peak_bytes;
    return std::move(layout_);
  }

 private:
  using Buffer = ProgramLayout::Buffer;

  void add_buffers() {
    for (const Lifetime& each : lifetimes_.buffers) {
      layout_.buffers.push_back({.name = listing_.name(each.value),
                                 .type = text_of(graph_.type(each.value)),
                                 .kind = "temporary",
                                 .label = {},
                                 .is_input = each.is_input,
                                 .bytes = each.bytes,
                                 .first = each.first,
                                 .last = each.last});
    }
    for (const GraphInput& input : graph_.inputs) {
      Buffer& buffer = layout_.buffers[buffer_of(input.value)];
      buffer.kind = name_of(input.kind);
      buffer.label = input.name;
    }
    for (const GraphOutput& output : graph_.outputs) {
      if (output.value == kNoValue) continue;
      Buffer& buffer = layout_.buffers[buffer_of(output.value)];
      if (buffer.is_input || buffer.kind == "gradient") continue;
      constexpr const char* kKinds[] = {"result", "written", "gradient"};
      buffer.kind = kKinds[static_cast<size_t>(output.kind)];
    }
    for (size_t value = 0; value < graph_.value_count(); ++value) {
      if (lifetimes_.buffer_of[value] != Lifetimes::kNone)
        devices_.insert(graph_.type(static_cast<ValueId>(value)).device.str());
    }
  }

  size_t buffer_of(ValueId value) const {
    return lifetimes_.buffer_of.at(static_cast<size_t>(value));
  }

  std::vector<size_t> buffers_of(const std::vector<ValueId>& values) const {
    std::vector<size_t> numbers;
    for (const ValueId value : values) {
      const size_t number = buffer_of(value);
      if (std::ranges::find(numbers, number) == numbers.end()) numbers.push_back(number);
    }
    return numbers;
  }

  void add_instruction(size_t at) {
    const Node& node = graph_.nodes[at];
    auto [operators, call] = listing_.instruction(at);
    ProgramLayout::Instruction instruction{.text = std::move(call),
                                           .op = node.op,
                                           .module = node.module,
                                           .operators = std::move(operators),
                                           .sends = is_launch(node),
                                           .reads = buffers_of(node.used()),
                                           .writes = buffers_of(node.defined()),
                                           .moved = bytes_moved(graph_, node),
                                           .held = lifetimes_.held[at]};
    if (is_view(node)) instruction.writes.clear();
    if (const auto& use = listing_.kernels().uses[at]) {
      auto& kernels = layout_.kernels;
      auto kernel = std::ranges::find(kernels, use->name, &ProgramLayout::Kernel::name);
      if (kernel == kernels.end())
        kernel = kernels.insert(kernels.end(),
                                {.name = use->name,
                                 .source = listing_.kernels().definition(*use),
                                 .device = listing_.kernels().sources[use->source].device});
      ++kernel->uses;
      instruction.kernel = static_cast<size_t>(kernel - kernels.begin());
    }
    layout_.instructions.push_back(std::move(instruction));
  }

  const Graph& graph_;
  const Listing listing_;
  const Lifetimes lifetimes_;
  ProgramLayout layout_;
  std::set<std::string> devices_;
};

}  // namespace
}  // namespace compiler

ProgramLayout layout_of(const Graph& program) {
  compiler::verify(program, "the passes");
  try {
    return compiler::LayoutBuilder(program).build();
  } catch (const c10::Error& error) {
    C10_THROW_ERROR(ValueError, c10::str("layout_of: expected a program that this version of ",
                                         "Tessera can run, got one of which kernels can't be ",
                                         "written: ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    C10_THROW_ERROR(ValueError, c10::str("layout_of: expected a program that this version of ",
                                         "Tessera can run, got one of which kernels can't be ",
                                         "written: ", error.what()));
  }
}

}  // namespace tessera
