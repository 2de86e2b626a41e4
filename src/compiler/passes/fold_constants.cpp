#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/passes/passes.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>

namespace tessera::compiler {
namespace {

/// A number among the arguments.
std::optional<at::Scalar> scalar_of(const Argument& argument) {
  if (argument.kind != Argument::Kind::Constant) return std::nullopt;
  const c10::IValue& constant = argument.constant;
  if (constant.isScalar()) return constant.toScalar();
  const bool is_number = constant.isTensor() && constant.toTensor().defined() &&
                         constant.toTensor().dim() == 0 && constant.toTensor().is_cpu();
  return is_number ? std::optional(constant.toTensor().item()) : std::nullopt;
}

bool equals(const at::Scalar& number, double value) {
  if (number.isBoolean() || number.isComplex()) return false;
  return number.isFloatingPoint() ? number.toDouble() == value
                                  : number.toLong() == static_cast<int64_t>(value);
}

/// Whether the call gives back its first argument, bit for bit and whatever its values. Adding zero
/// does not: -0.0 + 0.0 is 0.0.
bool is_neutral(const Node& node, const ValueType& type) {
  const auto does = arithmetic_of(node);
  if (!does || node.arguments.size() < 2) return false;
  const auto number = scalar_of(node.arguments[1]);
  if (!number) return false;
  if (*does == Arithmetic::Scales) return equals(*number, 1) && node.arguments.size() == 2;
  const bool is_sub = *does == Arithmetic::Subtracts;
  const auto alpha = scalar_of(node.arguments.at(2));
  if (!alpha || !equals(*alpha, 1) || !equals(*number, 0)) return false;
  const bool negative_zero = number->isFloatingPoint() && std::signbit(number->toDouble());
  return c10::isIntegralType(type.dtype, /*includeBool=*/false) || is_sub != negative_zero;
}

bool pins(const Node& node) {
  constexpr size_t kPinMemory = 4;
  return node.op == "aten::_to_copy" && node.arguments.at(kPinMemory).constant.isBool() &&
         node.arguments[kPinMemory].constant.toBool();
}

class Folder {
 public:
  explicit Folder(Graph& graph) : graph_(graph), memory_(graph) {}

  void run() {
    std::vector<bool> removed(graph_.nodes.size());
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      Node& node = graph_.nodes[i];
      replace_uses(node, replacements_);
      const auto source = unchanged(node);
      if (!source) continue;
      replacements_[node.results[0].values[0]] = *source;
      removed[i] = true;
    }
    replace_uses(graph_, replacements_);
    remove_nodes(graph_, removed);
  }

 private:
  /// The value that can stand for the node's result.
  std::optional<ValueId> unchanged(const Node& node) const {
    if (node.results.size() != 1 || node.results[0].kind != Argument::Kind::Value)
      return std::nullopt;
    const ValueId result = node.results[0].values[0];
    const size_t from = node.op == "aten::copy" ? 1 : 0;
    if (node.arguments.size() <= from || node.arguments[from].kind != Argument::Kind::Value)
      return std::nullopt;
    const ValueId source = node.arguments[from].values[0];
    if (result == kNoValue || source == kNoValue ||
        !same_layout(graph_.type(result), graph_.type(source)))
      return std::nullopt;
    if (views_from_start(node))
      return is_input_given_back(source, result) ? std::nullopt : std::optional(source);
    const bool is_same = (compiler::is_copy(node) && !consumes(node) && !pins(node)) ||
                         is_neutral(node, graph_.type(result));
    return is_same && can_share(source, result) ? std::optional(source) : std::nullopt;
  }

  /// A caller who gets a view of an argument does not want the argument.
  bool is_input_given_back(ValueId source, ValueId result) const {
    return !memory_.inputs(source).empty() && memory_.is_returned(result);
  }

  bool can_share(ValueId source, ValueId result) const {
    if (memory_.is_consumed(source) || memory_.is_consumed(result) || memory_.is_returned(result))
      return false;
    // Writes come one after the other: the memory of an input may have been written before this one
    // is copied.
    return !memory_.is_written(result) || memory_.inputs(source).empty();
  }

  Graph& graph_;
  const MemoryAnalysis memory_;
  Replacements replacements_;
};

}  // namespace

void fold_constants(Graph& graph) { Folder(graph).run(); }

}  // namespace tessera::compiler
