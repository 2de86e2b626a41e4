#include <tessera/compile/layout.h>

#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"
#include "compiler/ir/verify.h"
#include "compiler/kernels/lifetimes.h"
#include "compiler/kernels/traffic.h"
#include "compiler/runtime/listing.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

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
