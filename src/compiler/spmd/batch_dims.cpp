#include "compiler/spmd/batch_dims.h"

#include "compiler/ir/operators.h"
#include "dtensor/rules.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace tessera::compiler {
namespace {

/// What is known of a value.
struct KnownPlacement {
  enum class Kind {
    Nothing,
    Made,  // of no other value, as by zeros(): its rows are as many as this rank's
    Placed,
  };
  Kind kind = Kind::Nothing;
  Placement placement = Replicate();

  bool is(const Placement& wanted) const {
    return kind == Kind::Made || (kind == Kind::Placed && placement == wanted);
  }
};

class Analysis {
 public:
  explicit Analysis(Graph& graph) : graph_(graph), known_(graph.value_count()) {}

  void run() {
    for (const auto& input : graph_.inputs)
      at(input.value) = placed(graph_.type(input.value).placement.value_or(Replicate()));
    for (const auto& node : graph_.nodes) visit(node);
    for (const auto& node : graph_.nodes) {
      for (const auto value : node.defined()) {
        if (at(value).kind == KnownPlacement::Kind::Placed)
          graph_.type(value).placement = at(value).placement;
      }
    }
  }

 private:
  KnownPlacement& at(ValueId value) { return known_.at(static_cast<size_t>(value)); }
  static KnownPlacement placed(Placement placement) {
    return {KnownPlacement::Kind::Placed, std::move(placement)};
  }

  void visit(const Node& node) {
    const auto op = find_operator(node.op);
    if (!op) return;
    const auto own = own_returns(op->schema());
    // An operator that writes an argument returns it, as its functional twin would.
    const bool is_in_place = own.empty() && node.results.size() == 1;
    if (own.size() != node.results.size() && !is_in_place) return;
    const auto used = node.used();
    if (used.empty()) return set(node, {}, KnownPlacement{KnownPlacement::Kind::Made, Replicate()});
    const bool are_known = std::all_of(used.begin(), used.end(), [&](ValueId value) {
      return at(value).kind != KnownPlacement::Kind::Nothing;
    });
    if (!are_known) return;
    const bool are_equal = std::all_of(used.begin(), used.end(),
                                       [&](ValueId value) { return at(value).is(Replicate()); });
    if (are_equal) {
      const bool is_made = std::all_of(used.begin(), used.end(), [&](ValueId value) {
        return at(value).kind == KnownPlacement::Kind::Made;
      });
      return set(
          node, {},
          is_made ? KnownPlacement{KnownPlacement::Kind::Made, Replicate()} : placed(Replicate()));
    }
    try {
      by_rule(node, *op, is_in_place ? std::vector<size_t>{0} : own);
    } catch (const c10::Error&) {
      return;  // a rule that refuses the call tells nothing of it
    }
  }

  /// By result; all the same if there is only one `known`.
  void set(const Node& node, const std::vector<KnownPlacement>& by_result,
           const KnownPlacement& known) {
    for (size_t i = 0; i < node.results.size(); ++i) {
      for (const auto value : node.results[i].values) {
        if (value != kNoValue) at(value) = by_result.empty() ? known : by_result[i];
      }
    }
  }

  void by_rule(const Node& node, const c10::OperatorHandle& op,
               const std::vector<size_t>& returns) {
    const auto* rule = dtensor::find_rule(op);
    if (rule == nullptr || !rule->rows) return;
    const dtensor::Call call(op.schema(), stack_of(node, op.schema()));
    // Every rank has as many rows as any other: as if there were one.
    for (const auto& row : rule->rows(call, /*ranks=*/1)) {
      if (!fits(node, call, row)) continue;
      std::vector<KnownPlacement> results;
      for (const size_t i : returns) results.push_back(placed(row.placements.at(i)));
      return set(node, results, {});
    }
  }

  bool fits(const Node& node, const dtensor::Call& call, const dtensor::Row& row) {
    for (size_t i = 0; i < call.input_count(); ++i) {
      const auto& wanted = row.placements.at(call.output_count() + i);
      const auto& argument = node.arguments[call.inputs()[i].index];
      if (!call.has(i)) continue;
      if (argument.values.empty() && wanted != Replicate()) return false;  // a number
      for (const auto value : argument.values) {
        if (value != kNoValue && !at(value).is(wanted)) return false;
      }
    }
    return true;
  }

  torch::jit::Stack stack_of(const Node& node, const c10::FunctionSchema& schema) const {
    torch::jit::Stack stack;
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      const auto& argument = node.arguments[i];
      const bool is_tensor = schema.arguments()[i].type()->kind() == c10::TypeKind::TensorType;
      if (argument.kind == Argument::Kind::Value) {
        stack.emplace_back(like(argument.values[0]));
      } else if (argument.kind == Argument::Kind::List) {
        stack.emplace_back(list_of(argument, schema.arguments()[i]));
      } else {
        const auto& number = argument.constant;
        stack.push_back(is_tensor && number.isScalar() ? as_tensor(number.toScalar()) : number);
      }
    }
    return stack;
  }

  c10::IValue list_of(const Argument& argument, const c10::Argument& declared) const {
    const auto& element = declared.type()->containedType(0);
    if (element->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto value : argument.values)
        list.push_back(value == kNoValue ? std::nullopt : std::optional(like(value)));
      return list;
    }
    std::vector<at::Tensor> list;
    for (const auto value : argument.values) list.push_back(like(value));
    return list;
  }

  at::Tensor like(ValueId value) const {
    if (value == kNoValue) return {};
    const auto& type = graph_.type(value);
    return at::empty_strided(type.sizes, type.strides,
                             at::TensorOptions(at::kMeta).dtype(type.dtype));
  }

  static c10::IValue as_tensor(const at::Scalar& number) {
    auto tensor = at::scalar_to_tensor(number);
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }

  Graph& graph_;
  std::vector<KnownPlacement> known_;
};

}  // namespace

void note_batch_dims(Graph& graph) { Analysis(graph).run(); }

}  // namespace tessera::compiler
