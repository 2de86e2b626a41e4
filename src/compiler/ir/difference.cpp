#include "compiler/ir/difference.h"

#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"

#include <ATen/ops/equal.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace tessera::compiler {
namespace {

bool same_number(double first, double second) {
  return (std::isnan(first) && std::isnan(second)) ||
         std::bit_cast<uint64_t>(first) == std::bit_cast<uint64_t>(second);
}

/// Constants that are tensors are numbers on the CPU.
bool same_tensor(const at::Tensor& first, const at::Tensor& second) {
  if (!first.defined() || !second.defined()) return first.defined() == second.defined();
  const auto is_weak = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->is_wrapped_number();
  };
  return first.scalar_type() == second.scalar_type() && first.sizes() == second.sizes() &&
         is_weak(first) == is_weak(second) && at::equal(first, second);
}

/// " in blocks.0", for a message.
std::string in_module(const Node& node) { return node.module.empty() ? "" : " in " + node.module; }

std::string became(const std::string& before, const std::string& after) {
  return c10::str("`", before, "` became `", after, "`");
}

/// Compares two graphs, node by node. How values are numbered is no matter: an operator that gave
/// what was known already takes numbers, too.
class Comparison {
 public:
  Comparison(const Graph& before, const Graph& after)
      : before_(before), after_(after), same_(before.value_count(), kNoValue) {}

  std::string run() {
    for (size_t i = 0; i < std::max(before_.inputs.size(), after_.inputs.size()); ++i) {
      if (auto found = input(i); !found.empty()) return found;
    }
    for (size_t i = 0; i < std::max(before_.nodes.size(), after_.nodes.size()); ++i) {
      if (auto found = node(i); !found.empty()) return found;
    }
    for (size_t i = 0; i < std::max(before_.outputs.size(), after_.outputs.size()); ++i) {
      if (auto found = output(i); !found.empty()) return found;
    }
    return {};
  }

 private:
  std::string input(size_t index) {
    const bool is_extra = index >= before_.inputs.size();
    if (is_extra || index >= after_.inputs.size())
      return c10::str("the tensor ", quote((is_extra ? after_ : before_).inputs[index].name),
                      is_extra ? " comes in besides" : " comes in no more");
    const auto& was = before_.inputs[index];
    const auto& is = after_.inputs[index];
    if (was.kind != is.kind || was.name != is.name)
      return "a tensor that comes in: " + became(was.name, is.name);
    same_.at(static_cast<size_t>(was.value)) = is.value;
    return type("the tensor " + quote(was.name), was.value, is.value);
  }

  std::string node(size_t index) {
    const bool is_extra = index >= before_.nodes.size();
    if (is_extra || index >= after_.nodes.size()) {
      const auto& graph = is_extra ? after_ : before_;
      const auto& other = graph.nodes[index];
      return c10::str("`", text_of(graph, other), "`", in_module(other),
                      is_extra ? " comes besides" : " comes no more");
    }
    const auto& was = before_.nodes[index];
    const auto& is = after_.nodes[index];
    if (was.op != is.op || was.arguments.size() != is.arguments.size() ||
        was.results.size() != is.results.size())
      return became(text_of(before_, was), text_of(after_, is)) + in_module(is);
    for (size_t i = 0; i < was.arguments.size(); ++i) {
      if (!matches(was.arguments[i], is.arguments[i])) return argument(was, is, i);
    }
    if (auto found = results(was, is); !found.empty()) return found;
    if ((was.body == nullptr) != (is.body == nullptr)) return "the body of " + was.op;
    return was.body ? first_difference(*was.body, *is.body) : std::string();
  }

  std::string argument(const Node& was, const Node& is, size_t index) const {
    const auto op = find_operator(is.op);
    const auto name = op ? op->schema().arguments()[index].name() : std::to_string(index);
    return c10::str("argument '", name, "' of ", is.op, in_module(is), ": ",
                    became(text_of(before_, was), text_of(after_, is)));
  }

  std::string results(const Node& was, const Node& is) {
    for (size_t i = 0; i < was.results.size(); ++i) {
      const auto& before = was.results[i].values;
      const auto& after = is.results[i].values;
      const auto is_there = [](ValueId value) { return value != kNoValue; };
      if (was.results[i].kind != is.results[i].kind ||
          !std::ranges::equal(before, after, {}, is_there, is_there))
        return "what " + is.op + in_module(is) +
               " gives: " + became(text_of(before_, was), text_of(after_, is));
      for (size_t k = 0; k < before.size(); ++k) {
        if (before[k] == kNoValue) continue;
        same_.at(static_cast<size_t>(before[k])) = after[k];
        if (auto found = type("what " + is.op + in_module(is) + " gives", before[k], after[k]);
            !found.empty())
          return found;
      }
    }
    return {};
  }

  /// Of the second graph: the value that this one of the first is.
  ValueId counterpart(ValueId value) const {
    return value == kNoValue ? kNoValue : same_.at(static_cast<size_t>(value));
  }

  bool matches(const Argument& was, const Argument& is) const {
    const auto of_first = [&](ValueId value) { return counterpart(value); };
    return was.kind == is.kind && std::ranges::equal(was.values, is.values, {}, of_first) &&
           same_constant(was.constant, is.constant);
  }

  std::string output(size_t index) const {
    if (index >= before_.outputs.size()) return "something goes out besides";
    if (index >= after_.outputs.size()) return "something goes out no more";
    const auto& was = before_.outputs[index];
    const auto& is = after_.outputs[index];
    if (was.kind == is.kind && counterpart(was.value) == is.value &&
        counterpart(was.target) == is.target)
      return {};
    return "what goes out: " + became(output_text(before_, was), output_text(after_, is));
  }

  static std::string output_text(const Graph& graph, const GraphOutput& output) {
    const auto value = output.value == kNoValue ? std::string("_") : c10::str("%", output.value);
    if (output.kind == OutputKind::Result) return "return " + value;
    const auto target = std::ranges::find(graph.inputs, output.target, &GraphInput::value);
    const auto name = target == graph.inputs.end() ? "" : target->name;
    return (output.kind == OutputKind::Write ? "write " : "gradient ") + value +
           (output.kind == OutputKind::Write ? " to " : " of ") + name;
  }

  std::string type(const std::string& what, ValueId was, ValueId is) const {
    if (before_.type(was) == after_.type(is)) return {};
    return what + ": " + became(text_of(before_.type(was)), text_of(after_.type(is)));
  }

  const Graph& before_;
  const Graph& after_;
  std::vector<ValueId> same_;  // by value of the first: which of the second it is
};

}  // namespace

bool same_constant(const c10::IValue& first, const c10::IValue& second) {
  if (first.tagKind() != second.tagKind()) return false;
  if (first.isGenerator()) return first.toGenerator() == second.toGenerator();
  if (first.isDouble()) return same_number(first.toDouble(), second.toDouble());
  if (first.isTensor()) return same_tensor(first.toTensor(), second.toTensor());
  if (first.isComplexDouble()) {
    const auto one = first.toComplexDouble(), other = second.toComplexDouble();
    return same_number(one.real(), other.real()) && same_number(one.imag(), other.imag());
  }
  if (first.isList()) {
    const auto one = first.toListRef(), other = second.toListRef();
    return std::equal(one.begin(), one.end(), other.begin(), other.end(), same_constant);
  }
  return first == second;
}

bool same_argument(const Argument& first, const Argument& second) {
  return first.kind == second.kind && first.values == second.values &&
         same_constant(first.constant, second.constant);
}

std::string first_difference(const Graph& before, const Graph& after) {
  return Comparison(before, after).run();
}

}  // namespace tessera::compiler
