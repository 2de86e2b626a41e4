#include "compiler/ir/verify.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>

namespace tessera::compiler {
namespace {

using Kind = Argument::Kind;

bool is_tensor(const c10::TypePtr& type) {
  return required(type)->kind() == c10::TypeKind::TensorType;
}

bool is_tensor_list(const c10::TypePtr& type) {
  const auto list = required(type)->cast<c10::ListType>();
  return list && is_tensor(list->getElementType());
}

bool fits(const Argument& argument, const c10::TypePtr& type) {
  switch (argument.kind) {
    case Kind::Constant:
      if (argument.constant.isBool() && required(type)->kind() == c10::TypeKind::NumberType)
        return true;                                                   // a Scalar may be one
      if (argument.constant.isNone() && is_tensor(type)) return true;  // an undefined one
      return argument.constant.type()->isSubtypeOf(*type);
    case Kind::Value:
      return argument.values.size() == 1 && is_tensor(type);
    case Kind::List:
      return is_tensor_list(type);
  }
  return false;
}

/// Whether a tensor is there, and not only the place of one.
bool is_given(const Argument& argument) {
  const auto& values = argument.values;
  if (argument.kind == Kind::Constant) return !argument.constant.isNone();
  return std::find(values.begin(), values.end(), kNoValue) == values.end();
}

bool is_optional(const c10::TypePtr& type) {
  if (const auto list = type->cast<c10::ListType>()) return is_optional(list->getElementType());
  return type->kind() == c10::TypeKind::OptionalType;
}

/// Some operators of libtorch take undefined tensors for what they declare as required. Those that
/// passes look into never do.
std::string absent_tensor_mismatch(const Node& node, const c10::FunctionSchema& schema) {
  const bool is_sent = is_collective(node);
  const bool is_known = is_sent || is_view(node) || is_pointwise(node) ||
                        node.op.starts_with("tessera::") || consumes(node);
  for (size_t i = 0; is_known && i < node.arguments.size(); ++i) {
    const auto& declared = schema.arguments()[i];
    const bool is_tensors = is_tensor(declared.type()) || is_tensor_list(declared.type());
    if (!is_tensors || is_optional(declared.type())) continue;
    if (!is_given(node.arguments[i]) || (is_sent && node.arguments[i].kind == Kind::Constant))
      return "expected a tensor of the graph as argument '" + declared.name() + "', not none";
  }
  for (const Argument& result : node.results) {
    if (is_sent && !is_given(result)) return "expected results of a collective, not none";
  }
  return "";
}

std::string described(const Argument& argument) {
  switch (argument.kind) {
    case Kind::Constant:
      return "a constant " + argument.constant.type()->str();
    case Kind::Value:
      return "a tensor";
    case Kind::List:
      break;
  }
  return "a list of " + std::to_string(argument.values.size()) + " tensors";
}

bool is_result(const Argument& argument) {
  return argument.kind == Kind::List ||
         (argument.kind == Kind::Value && argument.values.size() == 1);
}

std::string fused_mismatch(const Node& node) {
  for (const Argument& result : node.results) {
    if (!is_result(result)) return "expected tensors as results, not " + described(result);
  }
  if (!node.body) return "expected a body that says what the kernel computes, not none";
  if (node.body->inputs.size() != node.used().size())
    return c10::str("expected a body with ", node.used().size(), " inputs, not ",
                    node.body->inputs.size());
  if (node.body->outputs.size() != node.defined().size())
    return c10::str("expected a body with ", node.defined().size(), " outputs, not ",
                    node.body->outputs.size());
  return "";
}

/// The kinds of the results that this call must have: what becomes of consumed arguments, then what
/// the operator makes. -1: a list of unknown length, -2: a tensor.
std::vector<int64_t> expected_results(const Node& node, const c10::FunctionSchema& schema) {
  constexpr int64_t kAnyLength = -1, kTensor = -2;
  std::vector<int64_t> expected;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (!writes(node, i)) continue;
    const bool list = node.arguments[i].kind == Kind::List;
    expected.push_back(list ? static_cast<int64_t>(node.arguments[i].values.size()) : kTensor);
  }
  for (const size_t i : own_returns(schema))
    expected.push_back(is_tensor(schema.returns()[i].type()) ? kTensor : kAnyLength);
  return expected;
}

std::string result_mismatch(const Node& node, const c10::FunctionSchema& schema) {
  const auto expected = expected_results(node, schema);
  if (node.results.size() != expected.size())
    return c10::str("expected ", expected.size(), " results, not ", node.results.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const Argument& result = node.results[i];
    const bool list = expected[i] != -2;
    const bool right_length =
        expected[i] < 0 || expected[i] == static_cast<int64_t>(result.values.size());
    if (!is_result(result) || (result.kind == Kind::List) != list || !right_length)
      return c10::str("expected ", list ? "a list" : "a tensor",
                      expected[i] >= 0 ? c10::str(" of ", expected[i]) : std::string(),
                      " as result ", i, ", not ", described(result));
  }
  return "";
}

}  // namespace

std::string schema_mismatch(const Node& node) {
  if (node.op == kFused) return fused_mismatch(node);
  const auto op = find_operator(node.op);
  if (!op) return "expected an operator that libtorch knows, not '" + node.op + "'";
  if (node.body) return "expected no body of an operator but tessera::fused";
  const auto& schema = op->schema();
  if (node.arguments.size() != schema.arguments().size())
    return c10::str("expected ", schema.arguments().size(), " arguments, not ",
                    node.arguments.size());
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    const auto& declared = schema.arguments()[i];
    if (!fits(node.arguments[i], declared.type()))
      return "expected " + declared.type()->str() + " as argument '" + declared.name() + "', not " +
             described(node.arguments[i]);
  }
  if (auto complaint = result_mismatch(node, schema); !complaint.empty()) return complaint;
  return absent_tensor_mismatch(node, schema);
}

namespace {

/// Walks a graph in the order of execution.
class Verifier {
 public:
  Verifier(const Graph& graph, const std::string& after) : graph_(graph), after_(after) {}

  void run() {
    states_.assign(graph_.value_count(), State::Undefined);
    for (const GraphInput& input : graph_.inputs) define(input.value, "input " + quote(input.name));
    for (const Node& node : graph_.nodes) form(node);
    for (const GraphOutput& each : graph_.outputs) output(each);
    const MemoryAnalysis aliases(graph_);
    states_.assign(graph_.value_count(), State::Usable);
    for (const Node& node : graph_.nodes) memory(node, aliases);
    for (const GraphOutput& each : graph_.outputs) {
      if (each.value != kNoValue && state(each.value) == State::Consumed)
        fail("the outputs", c10::str("%", each.value,
                                     " is used after it, or what it shares memory "
                                     "with, has been consumed"));
    }
  }

 private:
  enum class State : uint8_t { Undefined, Usable, Consumed };

  [[noreturn]] void fail(const std::string& where, const std::string& what) const {
    C10_THROW_ERROR(ValueError, c10::str("compile: the graph after ", after_,
                                         " is not well-formed: ", where, ": ", what));
  }

  State& state(ValueId value) { return states_.at(static_cast<size_t>(value)); }

  void define(ValueId value, const std::string& where) {
    if (value < 0 || static_cast<size_t>(value) >= states_.size())
      fail(where, c10::str("%", value, " has no type"));
    if (state(value) != State::Undefined) fail(where, c10::str("%", value, " is defined twice"));
    state(value) = State::Usable;
    const ValueType& type = graph_.type(value);
    if (type.sizes.size() != type.strides.size())
      fail(where, c10::str("%", value, " has ", type.sizes.size(), " sizes and ",
                           type.strides.size(), " strides"));
  }

  void use(ValueId value, const std::string& where) {
    const bool exists = value >= 0 && static_cast<size_t>(value) < states_.size();
    if (!exists || state(value) == State::Undefined)
      fail(where, c10::str("%", value, " is used before it is defined"));
  }

  void form(const Node& node) {
    const auto where = [&] { return safe_text(node); };
    for (const ValueId value : node.used()) {
      const bool exists = value >= 0 && static_cast<size_t>(value) < states_.size();
      if (!exists || state(value) == State::Undefined) use(value, where());
    }
    for (const ValueId value : node.defined()) define(value, node.op);
    if (const auto complaint = schema_mismatch(node); !complaint.empty()) fail(where(), complaint);
    if (node.body) body(node);
  }

  void body(const Node& node) {
    verify(*node.body, after_);
    const auto used = node.used();
    const auto defined = node.defined();
    for (size_t i = 0; i < used.size(); ++i)
      same_type(graph_.type(used[i]), node.body->type(node.body->inputs[i].value), node);
    for (size_t i = 0; i < defined.size(); ++i) {
      const ValueId inner = node.body->outputs[i].value;
      if (inner == kNoValue) fail(safe_text(node), "the body lacks a result");
      same_type(graph_.type(defined[i]), node.body->type(inner), node);
    }
  }

  void same_type(const ValueType& outer, const ValueType& inner, const Node& node) const {
    if (outer.dtype != inner.dtype || outer.sizes != inner.sizes)
      fail(safe_text(node),
           c10::str("outside of the body ", text_of(outer), ", inside ", text_of(inner)));
  }

  void output(const GraphOutput& output) {
    if (output.value != kNoValue) use(output.value, "the outputs");
    if (output.kind == OutputKind::Result) return;
    const auto is_target = [&](const GraphInput& each) { return each.value == output.target; };
    if (std::none_of(graph_.inputs.begin(), graph_.inputs.end(), is_target))
      fail("the outputs", c10::str("%", output.target, " is written, but is no input"));
    if (output.value == kNoValue) {
      if (output.kind == OutputKind::Gradient) return;
      fail("the outputs", c10::str("nothing is written to %", output.target));
    }
    const ValueType& from = graph_.type(output.value);
    const ValueType& to = graph_.type(output.target);
    // A distributed gradient may be placed otherwise than its parameter.
    const bool fits = output.kind == OutputKind::Gradient ? from.sizes.size() == to.sizes.size()
                                                          : from.sizes == to.sizes;
    if (!fits || from.dtype != to.dtype)
      fail("the outputs", c10::str("%", output.value, ": ", text_of(from), " does not fit into %",
                                   output.target, ": ", text_of(to)));
  }

  /// Nothing may use what has been consumed; nothing may consume what is being sent.
  void memory(const Node& node, const MemoryAnalysis& aliases) {
    for (const ValueId value : node.used()) {
      if (state(value) == State::Consumed)
        fail(safe_text(node), c10::str("%", value,
                                       " is used after it, or what it shares memory "
                                       "with, has been consumed"));
    }
    if (is_wait(node)) sent_.erase(node.used().front());
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      if (!writes(node, i)) continue;
      for (const ValueId value : node.arguments[i].values) {
        if (value != kNoValue) consume(node, value, aliases);
      }
    }
    for (const ValueId value : node.defined()) state(value) = State::Usable;
    if (!reads_until_waited(node)) return;
    const auto sources = node.used();
    const auto pending = node.defined();
    // Of coalesced ones each result comes from the argument at its place in the list.
    const bool one_by_one = sources.size() == pending.size();
    for (size_t i = 0; i < pending.size(); ++i)
      sent_[pending[i]] = one_by_one ? std::vector{sources[i]} : sources;
  }

  void consume(const Node& node, ValueId consumed, const MemoryAnalysis& aliases) {
    for (const auto& [pending, sources] : sent_) {
      for (const ValueId source : sources) {
        // A launch that writes its argument hands on that very memory.
        if (!aliases.overlap(pending, source) && aliases.overlap(consumed, source))
          fail(safe_text(node), c10::str("%", consumed, " is consumed while %", pending,
                                         " is still being computed from it"));
      }
    }
    for (const ValueId input : aliases.inputs(consumed)) check_is_written(node, input);
    for (const ValueId value : aliases.overlapping(consumed)) state(value) = State::Consumed;
  }

  /// An input's memory is the caller's: what is consumed must be given back by a Write. Gradients
  /// are exempt, for a caller may not want them.
  void check_is_written(const Node& node, ValueId input) const {
    const auto found = std::find_if(graph_.inputs.begin(), graph_.inputs.end(),
                                    [&](const GraphInput& each) { return each.value == input; });
    if (found->kind == InputKind::Gradient) return;
    const bool is_written =
        std::any_of(graph_.outputs.begin(), graph_.outputs.end(), [&](const GraphOutput& each) {
          return each.kind == OutputKind::Write && each.target == input;
        });
    if (!is_written)
      fail(safe_text(node), c10::str("the memory of the input ", quote(found->name),
                                     " is consumed, but no output is written to it"));
  }

  /// Text of a node that may be malformed.
  std::string safe_text(const Node& node) const {
    for (const auto* list : {&node.arguments, &node.results}) {
      for (const Argument& argument : *list) {
        const bool is_value = argument.kind == Argument::Kind::Value;
        if (is_value && argument.values.size() != 1) return node.op;
        for (const ValueId value : argument.values) {
          if (value != kNoValue && static_cast<size_t>(value) >= graph_.value_count())
            return node.op;
        }
      }
    }
    return text_of(graph_, node);
  }

  const Graph& graph_;
  const std::string& after_;
  std::vector<State> states_;
  std::unordered_map<ValueId, std::vector<ValueId>> sent_;  // results of launches, what they read
};

}  // namespace

void verify(const Graph& graph, const std::string& after) { Verifier(graph, after).run(); }

}  // namespace tessera::compiler
