#include <tessera/compile/layout.h>

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"
#include "compiler/ir/verify.h"
#include "compiler/kernels/traffic.h"
#include "compiler/runtime/listing.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <set>
#include <unordered_map>

namespace tessera {
namespace compiler {
namespace {

/// A text may claim any sizes.
int64_t add_bytes(int64_t left, int64_t right) {
  int64_t sum = 0;
  return __builtin_add_overflow(left, right, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

class LayoutBuilder {
 public:
  explicit LayoutBuilder(const Graph& graph) : graph_(graph), listing_(graph), memory_(graph) {
    for (size_t value = 0; value < graph.value_count(); ++value) {
      if (const ValueId home = listing_.in_place()[value]; home != kNoValue)
        memory_.join(static_cast<ValueId>(value), home);
    }
  }

  ProgramLayout build() {
    add_buffers();
    for (size_t i = 0; i < graph_.nodes.size(); ++i) add_instruction(i);
    layout_.outputs = listing_.outputs();
    layout_.devices.assign(devices_.begin(), devices_.end());
    for (const auto& buffer : layout_.buffers) {
      if (buffer.is_input) layout_.input_bytes = add_bytes(layout_.input_bytes, buffer.bytes);
    }
    find_peak();
    return std::move(layout_);
  }

 private:
  using Buffer = ProgramLayout::Buffer;

  void add_buffers() {
    for (const GraphInput& input : graph_.inputs) {
      Buffer& buffer = extend(input.value);
      buffer.kind = name_of(input.kind);
      buffer.label = input.name;
      buffer.is_input = true;
      buffer.last = graph_.nodes.size();
    }
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      // Results begin with what consumed arguments have become.
      size_t consumed = 0;
      for (size_t k = 0; k < node.arguments.size(); ++k) consumed += writes(node, k) ? 1 : 0;
      for (size_t k = 0; k < node.results.size(); ++k) {
        for (const ValueId value : node.results[k].values) {
          if (value != kNoValue) extend(value, i, !is_view(node) && k >= consumed);
        }
      }
    }
    for (const GraphOutput& output : graph_.outputs) {
      if (output.value == kNoValue) continue;
      Buffer& buffer = layout_.buffers[buffer_of(output.value)];
      buffer.last = graph_.nodes.size();
      if (buffer.is_input || buffer.kind == "gradient") continue;
      constexpr const char* kKinds[] = {"result", "written", "gradient"};
      buffer.kind = kKinds[static_cast<size_t>(output.kind)];
    }
  }

  /// The buffer in which the value lies, made with it if it is the first there. `allocates`: the
  /// value has memory of its own, which a later view may have put together with that of others.
  Buffer& extend(ValueId value, size_t at = 0, bool allocates = true) {
    const auto [found, is_new] = numbers_.emplace(memory_.memory(value), layout_.buffers.size());
    const ValueType& type = graph_.type(value);
    devices_.insert(type.device.str());
    if (is_new) {
      layout_.buffers.push_back({.name = listing_.name(value),
                                 .type = text_of(type),
                                 .kind = "temporary",
                                 .label = {},
                                 .first = at});
    }
    Buffer& buffer = layout_.buffers[found->second];
    const bool is_elsewhere = listing_.in_place().at(static_cast<size_t>(value)) != kNoValue;
    if (is_new || (allocates && !is_elsewhere))
      buffer.bytes = add_bytes(buffer.bytes, span_of(type));
    const int last = memory_.last_read(value);
    buffer.last = std::max(buffer.last, static_cast<size_t>(std::max(last, 0)));
    return buffer;
  }

  size_t buffer_of(ValueId value) const { return numbers_.at(memory_.memory(value)); }

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
                                           .moved = bytes_moved(graph_, node)};
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

  void find_peak() {
    auto& instructions = layout_.instructions;
    std::vector<std::vector<int64_t>> begin(instructions.size()), end(instructions.size() + 1);
    for (const Buffer& buffer : layout_.buffers) {
      if (buffer.is_input) continue;
      begin[buffer.first].push_back(buffer.bytes);
      end[buffer.last].push_back(buffer.bytes);
    }
    double held = 0;  // exact up to 8 PiB
    for (size_t i = 0; i < instructions.size(); ++i) {
      for (const int64_t bytes : begin[i]) held += static_cast<double>(bytes);
      instructions[i].held = static_cast<int64_t>(std::min(held, 9e18));
      for (const int64_t bytes : end[i]) held -= static_cast<double>(bytes);
      if (instructions[i].held <= layout_.peak_bytes) continue;
      layout_.peak_bytes = instructions[i].held;
      layout_.peak = i;
    }
  }

  const Graph& graph_;
  const Listing listing_;
  MemoryAnalysis memory_;
  ProgramLayout layout_;
  std::unordered_map<size_t, size_t> numbers_;  // of buffers, by that of the memory
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
