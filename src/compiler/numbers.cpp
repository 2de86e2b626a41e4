#include "compiler/numbers.h"

#include "compiler/ir/operators.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace tessera::compiler {

using detail::NumberKind;

namespace {

enum class Sign { Negative, Zero, One, Positive };

Sign sign_of(double number) {
  if (number == 0) return Sign::Zero;
  if (number == 1) return Sign::One;
  return number < 0 ? Sign::Negative : Sign::Positive;
}

bool is_power_of_two(double number) {
  int exponent = 0;
  return std::isfinite(number) && std::abs(std::frexp(number, &exponent)) == 0.5;
}

/// A number that an operator is given; none if the argument is anything else.
std::optional<double> given_number(const Argument& argument) {
  if (argument.kind != Argument::Kind::Constant) return std::nullopt;
  if (argument.constant.isDouble()) return argument.constant.toDouble();
  if (argument.constant.isInt()) return static_cast<double>(argument.constant.toInt());
  return std::nullopt;
}

bool takes_scalar(const Node& node, size_t index) {
  auto type = find_operator(node.op)->schema().arguments()[index].type();
  if (type->kind() == c10::TypeKind::OptionalType)
    type = type->expectRef<c10::OptionalType>().getElementType();
  return type->kind() == c10::TypeKind::NumberType || type->kind() == c10::TypeKind::FloatType ||
         type->kind() == c10::TypeKind::TensorType;
}

/// Whether an integer may be given as a double: dtypes of results don't depend on it.
bool is_all_floating(const Graph& graph, const Node& node) {
  const auto is_floating = [&](ValueId value) {
    return at::isFloatingType(graph.type(value).dtype);
  };
  const auto used = node.used(), defined = node.defined();
  return std::all_of(used.begin(), used.end(), is_floating) &&
         std::all_of(defined.begin(), defined.end(), is_floating);
}

/// Compares two recordings, argument by argument.
class Comparison {
 public:
  Comparison(const CallShape& call, const CallShape& other) : call_(call), other_(other) {
    for (size_t i = 0; i < call.numbers.size(); ++i) {
      if (call.numbers[i] != other.numbers[i]) changed_.push_back(i);
    }
  }

  const std::vector<size_t>& changed() const { return changed_; }

  /// The one number of the arguments, and its factor, that went from `before` to `after`.
  std::optional<std::pair<size_t, double>> explain(double before, double after) const {
    std::optional<std::pair<size_t, double>> found;
    for (const size_t i : changed_) {
      const double from = number_of(call_.numbers[i], call_.number_kinds[i]);
      const double to = number_of(other_.numbers[i], other_.number_kinds[i]);
      const double factor = before / from;
      if (!is_power_of_two(factor) || factor * from != before || factor * to != after) continue;
      if (found) return std::nullopt;  // it may be either
      found = {i, factor};
    }
    return found;
  }

  bool may_take(const Graph& graph, const Node& node, size_t argument, size_t number) const {
    if (!takes_scalar(node, argument)) return false;
    if (node.arguments[argument].constant.isDouble()) return true;
    return call_.number_kinds[number] == NumberKind::Whole && is_all_floating(graph, node);
  }

 private:
  const CallShape& call_;
  const CallShape& other_;
  std::vector<size_t> changed_;
};

/// None if a number differs that is not one of the arguments. Those that are become equal.
std::optional<std::vector<NumberUse>> level(Graph& graph, Graph& other,
                                            const Comparison& comparison) {
  std::vector<NumberUse> uses;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    auto& mine = graph.nodes[i].arguments;
    const auto& its = other.nodes[i].arguments;
    if (graph.nodes[i].op != other.nodes[i].op || mine.size() != its.size()) return std::nullopt;
    for (size_t k = 0; k < mine.size(); ++k) {
      const auto before = given_number(mine[k]), after = given_number(its[k]);
      if (!before || !after || *before == *after) continue;
      const auto found = comparison.explain(*before, *after);
      if (!found || !comparison.may_take(graph, graph.nodes[i], k, found->first))
        return std::nullopt;
      uses.push_back({i, k, found->first, found->second});
      mine[k] = its[k];
    }
  }
  return uses;
}

}  // namespace

double number_of(uint64_t bits, NumberKind kind) {
  return kind == NumberKind::Real ? std::bit_cast<double>(bits)
                                  : static_cast<double>(static_cast<int64_t>(bits));
}

bool may_vary(uint64_t from, uint64_t to, NumberKind kind) {
  if (kind == NumberKind::Fixed) return false;
  const double before = number_of(from, kind), after = number_of(to, kind);
  constexpr double kMostWhole = 9007199254740992;  // beyond it not every integer is a double
  const auto is_exact = [&](double number) {
    return std::isfinite(number) && (kind == NumberKind::Real || std::abs(number) < kMostWhole);
  };
  return is_exact(before) && is_exact(after) && sign_of(before) == sign_of(after);
}

CallShape with_numbers_of(CallShape call, const CallShape& other) {
  if (call.numbers.size() != other.numbers.size() || call.number_kinds != other.number_kinds)
    return call;
  for (size_t i = 0; i < call.numbers.size(); ++i) {
    if (may_vary(other.numbers[i], call.numbers[i], call.number_kinds[i]))
      call.numbers[i] = other.numbers[i];
  }
  return call;
}

std::optional<std::vector<NumberUse>> find_uses(const Recording& first, const CallShape& call,
                                                const Recording& second,
                                                const CallShape& other_call) {
  if (!different_inputs(first, second).empty()) return std::nullopt;
  const Comparison comparison(call, other_call);
  if (comparison.changed().empty()) {
    if (!difference(first.graph, second.graph).empty()) return std::nullopt;
    return std::vector<NumberUse>();
  }
  if (first.graph.nodes.size() != second.graph.nodes.size()) return std::nullopt;
  auto graph = first.graph, other = second.graph;
  auto uses = level(graph, other, comparison);
  if (!uses || !difference(graph, other).empty()) return std::nullopt;
  for (const size_t number : comparison.changed()) {
    const bool is_used = std::any_of(uses->begin(), uses->end(),
                                     [&](const auto& use) { return use.number == number; });
    if (!is_used) return std::nullopt;
  }
  return uses;
}

std::vector<size_t> used_numbers(const std::vector<NumberUse>& uses) {
  std::vector<size_t> numbers;
  for (const auto& use : uses) {
    if (std::find(numbers.begin(), numbers.end(), use.number) == numbers.end())
      numbers.push_back(use.number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

Graph with_numbers(Graph graph, const std::vector<NumberUse>& uses) {
  const auto numbers = used_numbers(uses);
  const auto before = graph.scalars.size();
  for (const size_t number : numbers) graph.scalars.push_back({c10::str("number ", number)});
  for (const auto& use : uses) {
    const auto place = std::find(numbers.begin(), numbers.end(), use.number) - numbers.begin();
    graph.nodes[use.node].arguments[use.argument] = {
        .kind = Argument::Kind::Scalar,
        .scalar = static_cast<int>(before) + static_cast<int>(place),
        .factor = use.factor};
  }
  return graph;
}

}  // namespace tessera::compiler
