#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/passes/passes.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

/// Of tensors that are sent together, those whose results nobody waits for in earnest.
void drop_members(Node& node, const std::vector<bool>& needed) {
  if (!is_launch(node) || !node.op.ends_with("_coalesced")) return;
  auto& sent = node.arguments[0].values;
  auto& received = node.results[0].values;
  std::vector<ValueId> kept_sent, kept_received;
  std::vector<int64_t> kept_messages;
  for (size_t i = 0; i < sent.size(); ++i) {
    if (!needed.at(static_cast<size_t>(received[i]))) continue;
    kept_sent.push_back(sent[i]);
    kept_received.push_back(received[i]);
    if (node.messages.size() == sent.size()) kept_messages.push_back(node.messages[i]);
  }
  sent = std::move(kept_sent);
  received = std::move(kept_received);
  node.messages = std::move(kept_messages);
}

/// By value: whether it is what a message brought, or a view of that.
std::vector<bool> find_received(const Graph& graph) {
  std::vector<bool> received(graph.value_count());
  for (const Node& node : graph.nodes) {
    const auto used = node.used();
    const bool is_part =
        is_view(node) && !used.empty() && received.at(static_cast<size_t>(used.front()));
    if (!is_wait(node) && !is_part) continue;
    for (const ValueId value : node.defined()) received.at(static_cast<size_t>(value)) = true;
  }
  return received;
}

/// Of a parameter of which this rank has no row it takes nothing of what comes; the others need
/// what it sends all the same.
bool takes_nothing(const Graph& graph, const Node& node) {
  const auto results = node.defined();
  return is_view(node) && std::ranges::all_of(results, [&](ValueId value) {
           return graph.type(value).numel() == 0;
         });
}

}  // namespace

void remove_dead_code(Graph& graph) {
  std::vector<bool> needed(graph.value_count());
  for (const GraphOutput& output : graph.outputs) {
    if (output.value != kNoValue) needed.at(static_cast<size_t>(output.value)) = true;
  }
  const auto is_needed = [&](ValueId value) { return needed.at(static_cast<size_t>(value)); };
  const auto received = find_received(graph);
  std::vector<bool> dead(graph.nodes.size());
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const Node& node = graph.nodes[i];
    const auto results = node.defined();
    dead[i] = !must_stay(node) && std::none_of(results.begin(), results.end(), is_needed);
    if (dead[i] && takes_nothing(graph, node)) {
      for (const ValueId value : node.used()) {
        if (received.at(static_cast<size_t>(value))) needed.at(static_cast<size_t>(value)) = true;
      }
    }
    if (dead[i]) continue;
    drop_members(graph.nodes[i], needed);
    for (const ValueId value : node.used()) needed.at(static_cast<size_t>(value)) = true;
  }
  // What a launch that stays has begun is waited for, wanted or not: its memory is being written.
  const Uses uses(graph);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!dead[i] || !is_wait(graph.nodes[i])) continue;
    const int launch = uses.definition(graph.nodes[i].used().front());
    if (launch != Uses::kInput) dead[i] = dead[static_cast<size_t>(launch)];
  }
  remove_nodes(graph, dead);
}

}  // namespace tessera::compiler
