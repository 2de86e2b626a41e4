#include "compiler/ir/rewrite.h"

#include "compiler/ir/operators.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

namespace tessera::compiler {

Graph renumbered(const Graph& graph) {
  Graph result;
  std::vector<ValueId> numbers(graph.value_count(), kNoValue);
  const auto define = [&](ValueId value) {
    numbers.at(static_cast<size_t>(value)) = result.add_value(graph.type(value));
  };
  const auto rename = [&](ValueId& value) {
    if (value != kNoValue) value = numbers.at(static_cast<size_t>(value));
  };
  result.inputs = graph.inputs;
  result.nodes = graph.nodes;
  result.outputs = graph.outputs;
  for (GraphInput& input : result.inputs) {
    define(input.value);
    rename(input.value);
  }
  for (Node& node : result.nodes) {
    for (const ValueId value : node.defined()) define(value);
    for (auto* side : {&node.arguments, &node.results}) {
      for (Argument& argument : *side) {
        for (ValueId& value : argument.values) rename(value);
      }
    }
  }
  for (GraphOutput& output : result.outputs) {
    rename(output.value);
    rename(output.target);
  }
  return result;
}

ValueId resolve(const Replacements& replacements, ValueId value) {
  for (auto found = replacements.find(value); found != replacements.end();
       found = replacements.find(value))
    value = found->second;
  return value;
}

void replace_uses(Node& node, const Replacements& replacements) {
  for (Argument& argument : node.arguments) {
    for (ValueId& value : argument.values) value = resolve(replacements, value);
  }
}

void replace_uses(Graph& graph, const Replacements& replacements) {
  if (replacements.empty()) return;
  for (Node& node : graph.nodes) replace_uses(node, replacements);
  for (GraphOutput& output : graph.outputs) output.value = resolve(replacements, output.value);
}

void remove_nodes(Graph& graph, const std::vector<bool>& removed) {
  std::vector<Node> kept;
  kept.reserve(graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!removed.at(i)) kept.push_back(std::move(graph.nodes[i]));
  }
  graph.nodes = std::move(kept);
}

namespace {

/// Emits nodes as soon as what they use is there.
class Order {
 public:
  explicit Order(const Graph& graph) : defined_(graph.value_count()) {
    for (const GraphInput& input : graph.inputs)
      defined_.at(static_cast<size_t>(input.value)) = true;
  }

  void add(Node node) {
    if (!is_ready(node)) return waiting_.push_back(std::move(node));
    emit(std::move(node));
    for (bool progress = !waiting_.empty(); progress;) {
      progress = false;
      const auto ready = std::find_if(waiting_.begin(), waiting_.end(),
                                      [this](const Node& each) { return is_ready(each); });
      if (ready == waiting_.end()) break;
      Node next = std::move(*ready);
      waiting_.erase(ready);
      emit(std::move(next));
      progress = !waiting_.empty();
    }
  }

  std::vector<Node> take() {
    TORCH_INTERNAL_ASSERT(waiting_.empty(),
                          "a pass made nodes that wait for each other: ", waiting_.front().op);
    return std::move(nodes_);
  }

 private:
  bool is_ready(const Node& node) const {
    const auto used = node.used();
    return std::all_of(used.begin(), used.end(),
                       [this](ValueId value) { return defined_.at(static_cast<size_t>(value)); });
  }

  void emit(Node node) {
    for (const ValueId value : node.defined()) defined_.at(static_cast<size_t>(value)) = true;
    nodes_.push_back(std::move(node));
  }

  std::vector<bool> defined_;
  std::vector<Node> nodes_;
  std::vector<Node> waiting_;
};

}  // namespace

void insert_nodes(Graph& graph, std::vector<std::pair<int, Node>> nodes) {
  std::stable_sort(nodes.begin(), nodes.end(),
                   [](const auto& left, const auto& right) { return left.first < right.first; });
  Order order(graph);
  auto next = nodes.begin();
  const auto add_up_to = [&](int index) {
    for (; next != nodes.end() && next->first <= index; ++next) order.add(std::move(next->second));
  };
  add_up_to(-1);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    order.add(std::move(graph.nodes[i]));
    add_up_to(static_cast<int>(i));
  }
  graph.nodes = order.take();
}

Node make_node(const std::string& op, std::vector<Argument> arguments,
               std::vector<Argument> results) {
  const auto handle = find_operator(op);
  TORCH_INTERNAL_ASSERT(handle, "no operator ", op);
  const auto& declared = handle->schema().arguments();
  for (size_t i = arguments.size(); i < declared.size(); ++i) {
    TORCH_INTERNAL_ASSERT(declared[i].default_value(), op, " lacks ", declared[i].name());
    arguments.push_back(Argument::of(*declared[i].default_value()));
  }
  return {.op = op, .arguments = std::move(arguments), .results = std::move(results)};
}

bool same_layout(const ValueType& left, const ValueType& right) {
  return left.dtype == right.dtype && left.device == right.device && left.sizes == right.sizes &&
         left.strides == right.strides;
}

bool passes_on(const Node& node) { return is_view(node) || is_copy(node); }

}  // namespace tessera::compiler
