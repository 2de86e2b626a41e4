#include "compiler/spmd/locality.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

bool is_mark(const Node& node) { return node.op == "tessera::gradient"; }

bool is_plain_sum(const Node& node) {
  if (node.op != "aten::add.Tensor" && node.op != "aten::add_.Tensor") return false;
  const auto& alpha = node.arguments.at(2);
  return alpha.kind == Argument::Kind::Constant && alpha.constant.isScalar() &&
         alpha.constant.toScalar().equal(1);
}

const GraphInput& input_of(const Graph& graph, ValueId value) {
  return *std::find_if(graph.inputs.begin(), graph.inputs.end(),
                       [&](const GraphInput& each) { return each.value == value; });
}

}  // namespace

Locality::Locality(const Graph& graph)
    : local_(graph.value_count()), summands_(graph.value_count()) {
  find_summands(graph);
  for (const auto& input : graph.inputs) {
    const auto& placement = graph.type(input.value).placement;
    const bool is_alike = placement && placement->is_replicate();
    local_.at(static_cast<size_t>(input.value)) = input.kind == InputKind::Argument && !is_alike;
  }
  do follow(graph);
  while (mark_written(graph));
}

bool Locality::is_summand(const Node& mark) const {
  return summands_.at(static_cast<size_t>(mark.results[0].values[0]));
}

void Locality::find_summands(const Graph& graph) {
  const Uses uses(graph);
  const auto only_user = [&](ValueId value) -> const Node* {
    const auto& users = uses.users(value);
    if (users.size() != 1 || users[0] == uses.end()) return nullptr;
    return &graph.nodes[static_cast<size_t>(users[0])];
  };
  for (const auto& node : graph.nodes) {
    if (!is_mark(node)) continue;
    const auto given = node.defined().front();
    const auto* sum = only_user(given);
    if (sum == nullptr || !is_plain_sum(*sum)) continue;
    const auto* next = only_user(sum->defined().front());
    summands_[static_cast<size_t>(given)] =
        next != nullptr && is_mark(*next) && next->arguments[1].values == node.arguments[1].values;
  }
}

void Locality::follow(const Graph& graph) {
  for (const auto& node : graph.nodes) {
    const bool is_local = depends_on_local(node);
    for (const auto value : node.defined()) local_[static_cast<size_t>(value)] = is_local;
  }
}

bool Locality::depends_on_local(const Node& node) const {
  if (is_mark(node)) return is_summand(node);
  if (reads_sizes_alone(node) || gives_all_ranks_the_same(node)) return false;
  const auto any_local = [this](const std::vector<ValueId>& values) {
    return std::any_of(values.begin(), values.end(),
                       [this](ValueId value) { return value != kNoValue && is_local(value); });
  };
  return any_local(takes_sizes_of_first(node) ? node.arguments.at(1).values : node.used());
}

bool Locality::mark_written(const Graph& graph) {
  bool is_new = false;
  for (const auto& output : graph.outputs) {
    if (output.kind != OutputKind::Write || !is_local(output.value)) continue;
    if (input_of(graph, output.target).kind != InputKind::Buffer) continue;
    is_new |= !is_local(output.target);
    local_[static_cast<size_t>(output.target)] = true;
  }
  return is_new;
}

void check_updates(const Graph& graph, const Locality& locality) {
  for (const auto& output : graph.outputs) {
    if (output.kind == OutputKind::Result || output.value == kNoValue) continue;
    const auto& input = input_of(graph, output.target);
    if (input.kind != InputKind::Parameter && input.kind != InputKind::State) continue;
    TORCH_CHECK_VALUE(
        !locality.is_local(output.value), "DataParallel: expected ", input.name,
        output.kind == OutputKind::Gradient ? " to have a gradient" : " to be updated by gradients",
        " that backward() leaves, which are averaged over ranks, got values of this rank's part of "
        "the batch, which would make ranks differ; call backward() in place of "
        "torch::autograd::grad(), and keep statistics of the batch in buffers");
  }
}

}  // namespace tessera::compiler
