#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <map>

namespace tessera::compiler {
namespace {

/// Gathers that are sent together, by index of their nodes: where the first of them stood, since
/// the results are needed one after the other from there on.
struct Gathers {
  std::vector<int> launches;
  int64_t bytes = 0;
};

/// What must agree: dtype, device, number of ranks and group.
std::string key_of(const Graph& graph, const Node& launch) {
  const ValueType& type = graph.type(launch.used().front());
  return c10::str(type.dtype, " on ", type.device, ", ",
                  text_of_constant(launch.arguments[1].constant, *c10::AnyType::get()), ", ",
                  text_of_constant(launch.arguments[2].constant, *c10::AnyType::get()));
}

/// Whether a gather is waited for once, so that it may be one of several.
bool is_waited_for(const Graph& graph, const Uses& uses, const Node& launch) {
  const auto& users = uses.users(launch.defined().front());
  return users.size() == 1 && users[0] != uses.end() &&
         is_wait(graph.nodes[static_cast<size_t>(users[0])]);
}

std::vector<Gathers> assign(const Graph& graph, const BucketCaps& caps) {
  const Uses uses(graph);
  std::map<std::string, std::pair<Gathers, int64_t>> open;  // with the cap
  std::vector<Gathers> closed;
  for (int i = 0; i < uses.end(); ++i) {
    const Node& node = graph.nodes[static_cast<size_t>(i)];
    if (node.op != "_c10d_functional::all_gather_into_tensor" || !is_waited_for(graph, uses, node))
      continue;
    auto& [gathers, cap] =
        open.try_emplace(key_of(graph, node), Gathers{}, caps.first).first->second;
    const bool exists_in_time =
        gathers.launches.empty() || uses.definition(node.used().front()) < gathers.launches.front();
    if (!exists_in_time) closed.push_back(std::exchange(gathers, {}));
    gathers.launches.push_back(i);
    gathers.bytes += graph.type(node.defined().front()).bytes();
    if (gathers.bytes < cap) continue;
    closed.push_back(std::exchange(gathers, {}));
    cap = caps.later;
  }
  for (auto& [key, rest] : open) closed.push_back(std::move(rest.first));
  std::erase_if(closed, [](const Gathers& each) { return each.launches.size() < 2; });
  return closed;
}

}  // namespace

void bucket_all_gathers(Graph& graph, const Caps& caps) {
  std::vector<bool> removed(graph.nodes.size());
  for (const Gathers& gathers : assign(graph, caps.value_or(BucketCaps{}))) {
    std::vector<ValueId> inputs, results;
    std::vector<int64_t> messages;
    for (const int launch : gathers.launches) {
      const Node& node = graph.nodes[static_cast<size_t>(launch)];
      inputs.push_back(node.used().front());
      results.push_back(node.defined().front());
      messages.insert(messages.end(), node.messages.begin(), node.messages.end());
      removed[static_cast<size_t>(launch)] = launch != gathers.launches.front();
    }
    Node& first = graph.nodes[static_cast<size_t>(gathers.launches.front())];
    first.op = "_c10d_functional::all_gather_into_tensor_coalesced";
    first.arguments[0] = Argument::of(std::move(inputs));
    first.results = {Argument::of(std::move(results))};
    first.messages = std::move(messages);
  }
  remove_nodes(graph, removed);
}

}  // namespace tessera::compiler
