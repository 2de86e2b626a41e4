// Note [computed again]. Forward, backward and update are one graph, so what backward needs of
// forward is a value that is made early and read late. If a kernel reads it late, and what it was
// made of is in memory then anyway, the kernel makes it once more:
//
//   %2 = aten::silu(%gate)                      %2 = aten::silu(%gate)
//   %3 = aten::mul.Tensor(%2, %up)              %3 = aten::mul.Tensor(%2, %up)
//   ...                                   =>    ...
//   %8 = aten::mul.Tensor(%7, %2)               %12 = aten::silu(%gate)
//   %9 = aten::silu_backward(%6, %gate)         %8 = aten::mul.Tensor(%7, %12)
//
// Now %2 is neither kept nor stored. That is done where it moves fewer bytes than before: loads
// that kernels have beyond those they had, against loads of the value and, if no other kernel
// needs it, its store. No memory is held for longer but single numbers (seeds of dropout), so the
// peak does not rise.
#include "compiler/passes/recompute.h"

#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/kernels/buffers.h"
#include "compiler/kernels/pointwise_rules.h"
#include "compiler/kernels/pointwise_table.h"
#include "compiler/passes/fuse.h"
#include "compiler/passes/fusion_groups.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <map>

namespace tessera::compiler {
namespace {

constexpr size_t kNoGroup = SIZE_MAX;
constexpr size_t kMostCopiesInKernel = 8;  // for one kernel

/// By node: the group it is part of.
std::vector<size_t> groups_by_node(const Graph& graph,
                                   const std::vector<std::vector<size_t>>& groups) {
  std::vector<size_t> group_of(graph.nodes.size(), kNoGroup);
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const size_t member : groups[i]) group_of[member] = i;
  }
  return group_of;
}

class KernelRecomputer {
 public:
  KernelRecomputer(const Graph& graph, int64_t least_bytes)
      : graph_(graph),
        least_bytes_(least_bytes),
        memory_(graph),
        finder_(graph, memory_),
        groups_(find_fusion_groups(graph)),
        group_of_(groups_by_node(graph, groups_)) {
    // An operator that is no kernel by itself is one with what it reads.
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      if (group_of_[i] != kNoGroup || !is_in_kernels(graph.nodes[i])) continue;
      group_of_[i] = groups_.size();
      groups_.push_back({i});
    }
    loads_.resize(groups_.size());
    for (size_t group = 0; group < groups_.size(); ++group) {
      for (const size_t member : groups_[group]) {
        for (const ValueId value : graph.nodes[member].used()) loads_[group].insert(value);
      }
    }
  }

  /// The chains of values that are worth it, but for those in `refused`.
  std::map<ValueId, std::vector<RecomputeChain>> find(const std::set<ValueId>& refused) {
    std::map<ValueId, std::vector<RecomputeChain>> found;
    for (const Node& node : graph_.nodes) {
      if (!is_in_kernels(node)) continue;
      const ValueId value = node.defined()[0];
      if (refused.contains(value)) continue;
      auto chains = late_chains(value);
      if (chains.empty()) continue;
      for (const RecomputeChain& chain : chains)
        kept_.insert(chain.leaves.begin(), chain.leaves.end());
      recomputed_.insert(value);
      found[value] = std::move(chains);
    }
    return found;
  }

 private:
  bool is_in_kernels(const Node& node) const {
    return is_repeatable(node) && !is_view(node) && node.results.size() == 1 &&
           node.results[0].kind == Argument::Kind::Value && pointwise_rule(graph_, node);
  }

  /// When the node runs: kernels run where their last operator is.
  size_t time_of(size_t node) const {
    return group_of_[node] == kNoGroup ? node : groups_[group_of_[node]].back();
  }

  bool is_seed(ValueId value) const {
    return std::ranges::any_of(memory_.uses().users(value), [&](int user) {
      return user != memory_.uses().end() && graph_.nodes[static_cast<size_t>(user)].op == kUniform;
    });
  }

  /// Whether the value is in memory at that time, whatever this pass does; or one of a few
  /// numbers, or of the seeds of dropout, which may stay.
  bool is_held(ValueId value, size_t time) const {
    if (!memory_.inputs(value).empty()) return true;
    const auto& values = memory_.neighbours(value);
    constexpr int64_t kFew = 4096;
    const auto is_small = [&](ValueId each) { return graph_.type(each).bytes() <= kFew; };
    const bool is_number = graph_.type(value).numel() == 1;
    if (is_number && (is_seed(value) || std::ranges::all_of(values, is_small))) return true;
    return std::ranges::any_of(values, [&](ValueId other) {
      const auto& users = memory_.uses().users(other);
      return !recomputed_.contains(other) && std::ranges::any_of(users, [&](int user) {
        return user == memory_.uses().end() || time_of(static_cast<size_t>(user)) >= time;
      });
    });
  }

  std::optional<RecomputeChain> chain_of(ValueId value, const std::vector<size_t>& users) const {
    RecomputeChain chain{.values = {value}, .users = users, .at = users.front()};
    const size_t time = time_of(users.front());
    const bool is_possible = finder_.extend(
        chain, value,
        [&](ValueId used) { return !recomputed_.contains(used) && is_held(used, time); },
        [&](const Node& node) { return is_in_kernels(node); }, kMostCopiesInKernel);
    return is_possible ? std::optional(std::move(chain)) : std::nullopt;
  }

  /// One for each kernel that reads the value when nothing else needs it any more; none if that
  /// moves no fewer bytes.
  std::vector<RecomputeChain> late_chains(ValueId value) const {
    const int64_t bytes = graph_.type(value).bytes();
    if (bytes < least_bytes_ || !finder_.is_private(value) || kept_.contains(value)) return {};
    const auto made = static_cast<size_t>(memory_.uses().definition(value));
    std::map<size_t, std::vector<size_t>> kernels;  // that use it, by time
    size_t needed = time_of(made);                  // until then, in memory or by its own kernel
    for (const int each : memory_.uses().users(value)) {
      const auto user = static_cast<size_t>(each);
      const size_t group = group_of_[user];
      if (group == kNoGroup || user >= finder_.mark())
        needed = std::max(needed, time_of(user));
      else if (group != group_of_[made])
        kernels[time_of(user)].push_back(user);
    }
    std::vector<RecomputeChain> chains;
    for (const auto& [time, users] : kernels) {
      auto chain = chain_of(value, users);
      if (chain)
        chains.push_back(std::move(*chain));
      else
        needed = std::max(needed, time);
    }
    std::erase_if(chains, [&](const RecomputeChain& chain) { return time_of(chain.at) <= needed; });
    const bool is_stored =
        group_of_[made] == kNoGroup || chains.size() < kernels.size() || needed > time_of(made);
    int64_t saved = is_stored ? 0 : bytes;
    for (const RecomputeChain& chain : chains) saved += bytes - added_loads(chain);
    return saved > 0 ? chains : std::vector<RecomputeChain>();
  }

  int64_t added_loads(const RecomputeChain& chain) const {
    const auto& loads = loads_[group_of_[chain.at]];
    int64_t bytes = 0;
    for (const ValueId leaf : chain.leaves) {
      if (!loads.contains(leaf)) bytes += span_of(graph_.type(leaf));
    }
    return bytes;
  }

  const Graph& graph_;
  const int64_t least_bytes_;
  const MemoryAnalysis memory_;
  const ChainFinder finder_;
  std::vector<std::vector<size_t>> groups_;
  std::vector<size_t> group_of_;          // by node
  std::vector<std::set<ValueId>> loads_;  // by group
  std::set<ValueId> kept_;                // which copies read
  std::set<ValueId> recomputed_;          // that are not kept any more
};

/// Whether each of the values is made and used in one kernel alone.
bool are_inside_kernels(const Graph& graph, const std::vector<size_t>& group_of, const Uses& uses,
                        const std::set<ValueId>& values) {
  return std::ranges::all_of(values, [&](ValueId value) {
    const size_t group = group_of[static_cast<size_t>(uses.definition(value))];
    return group != kNoGroup && std::ranges::all_of(uses.users(value), [&](int user) {
             return user < static_cast<int>(graph.nodes.size()) &&
                    group_of[static_cast<size_t>(user)] == group;
           });
  });
}

/// As bytes_moved(), of a kernel before anybody has written it.
int64_t traffic_of(const Graph& graph, const Node& node) {
  if (is_view(node)) return 0;
  const auto used = node.used(), defined = node.defined();
  std::set<ValueId> values(used.begin(), used.end());
  values.insert(defined.begin(), defined.end());
  int64_t bytes = 0;
  for (const ValueId value : values) bytes = add_bytes(bytes, span_of(graph.type(value)));
  return bytes;
}

}  // namespace

Planned plan_of(const Graph& graph, bool fuses) {
  Planned planned{graph, {}};
  if (fuses) fuse(planned.program);
  reuse_memory(planned.program);
  update_early(planned.program);
  planned.lifetimes = lifetimes_of(planned.program);
  for (const Node& node : planned.program.nodes)
    planned.traffic = add_bytes(planned.traffic, traffic_of(planned.program, node));
  return planned;
}

Recomputation recompute_in_kernels(Graph& graph, int64_t least_bytes) {
  std::set<ValueId> refused;
  while (true) {
    const auto found = KernelRecomputer(graph, least_bytes).find(refused);
    if (found.empty()) return {};
    Recomputation done{.values = static_cast<int64_t>(found.size())};
    std::vector<RecomputeChain> chains;
    for (const auto& [value, of_value] : found) {
      done.bytes += graph.type(value).bytes();
      chains.insert(chains.end(), of_value.begin(), of_value.end());
    }
    Graph rewritten = graph;
    const auto made = insert_copies(rewritten, chains);
    // What fuse leaves outside of the kernel would be stored and loaded after all.
    const auto group_of = groups_by_node(rewritten, find_fusion_groups(rewritten));
    const Uses uses(rewritten);
    const size_t before = refused.size();
    for (size_t i = 0; i < chains.size(); ++i) {
      if (!are_inside_kernels(rewritten, group_of, uses, made[i]))
        refused.insert(chains[i].values.begin(), chains[i].values.end());
    }
    if (refused.size() != before) continue;
    const Planned kept = plan_of(graph, true), without = plan_of(rewritten, true);
    done.added_traffic = without.traffic - kept.traffic;
    if (without.lifetimes.peak_bytes > kept.lifetimes.peak_bytes || done.added_traffic > 0)
      return {};
    graph = std::move(rewritten);
    return done;
  }
}

void recompute(Graph& graph) { recompute_in_kernels(graph); }

ChainFinder::ChainFinder(const Graph& graph, const MemoryAnalysis& memory)
    : graph_(graph), memory_(memory) {
  const auto mark = std::ranges::find(graph.nodes, std::string(kNextIteration), &Node::op);
  mark_ = static_cast<size_t>(mark - graph.nodes.begin());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    for (size_t k = 0; k < node.arguments.size(); ++k) {
      if (!writes(node, k)) continue;
      for (const ValueId value : node.arguments[k].values) {
        if (value != kNoValue) writes_.push_back({static_cast<int>(i), value});
      }
    }
  }
}

bool ChainFinder::is_private(ValueId value) const {
  return memory_.inputs(value).empty() && !memory_.is_consumed(value) &&
         !memory_.is_returned(value) && !memory_.is_written(value);
}

bool ChainFinder::is_unchanged(ValueId value, size_t at) const {
  const int made = memory_.uses().definition(value), end = static_cast<int>(at);
  return made < end && std::ranges::none_of(
                           writes_,
                           [&](const Write& write) {
                             return write.position > made && write.position < end &&
                                    memory_.overlap(value, write.value);
                           });
}

bool ChainFinder::extend(RecomputeChain& chain, ValueId value,
                         c10::function_ref<bool(ValueId)> is_there,
                         c10::function_ref<bool(const Node&)> may_copy, size_t most_nodes) const {
  const int made = memory_.uses().definition(value);
  if (made == Uses::kInput) return false;
  const auto index = static_cast<size_t>(made);
  if (std::ranges::find(chain.nodes, index) != chain.nodes.end()) return true;
  const Node& node = graph_.nodes[index];
  if (chain.nodes.size() >= most_nodes || !is_repeatable(node) || !may_copy(node)) return false;
  for (const ValueId used : node.used()) {
    if (is_there(used) && is_unchanged(used, chain.at)) {
      if (std::ranges::find(chain.leaves, used) == chain.leaves.end()) chain.leaves.push_back(used);
    } else if (!extend(chain, used, is_there, may_copy, most_nodes)) {
      return false;
    }
  }
  if (chain.nodes.size() >= most_nodes) return false;
  chain.nodes.push_back(index);
  return true;
}

bool is_repeatable(const Node& node) {
  if (node.op == kFused || node.op == kNextIteration || !find_operator(node.op)) return false;
  return !is_random(node) && !is_collective(node) && !has_effect(node) && !is_over_lists(node) &&
         !node.defined().empty();
}

namespace {

/// Drops those of the marked nodes that nothing needs any more.
void drop_unused(Graph& graph, const std::vector<bool>& marked) {
  std::vector<bool> needed(graph.value_count()), dropped(graph.nodes.size());
  for (const GraphOutput& output : graph.outputs) {
    if (output.value != kNoValue) needed[static_cast<size_t>(output.value)] = true;
  }
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const auto defined = graph.nodes[i].defined();
    dropped[i] = marked[i] && std::ranges::none_of(defined, [&](ValueId value) {
                   return needed[static_cast<size_t>(value)];
                 });
    if (dropped[i]) continue;
    for (const ValueId value : graph.nodes[i].used()) needed[static_cast<size_t>(value)] = true;
  }
  remove_nodes(graph, dropped);
}

}  // namespace

std::vector<std::set<ValueId>> insert_copies(Graph& graph,
                                             const std::vector<RecomputeChain>& chains) {
  const auto originals = graph.nodes;
  std::vector<std::set<ValueId>> made(chains.size());
  std::vector<std::vector<Node>> before(graph.nodes.size());
  std::vector<bool> is_copied(graph.nodes.size());
  for (size_t i = 0; i < chains.size(); ++i) {
    Replacements copies;
    for (const size_t index : chains[i].nodes) {
      is_copied[index] = true;
      Node copy = originals[index];
      replace_uses(copy, copies);
      for (Argument& result : copy.results) {
        for (ValueId& value : result.values) {
          if (value == kNoValue) continue;
          const ValueId own = graph.add_value(graph.type(value));
          copies[value] = own;
          made[i].insert(own);
          value = own;
        }
      }
      before[chains[i].at].push_back(std::move(copy));
    }
    std::erase_if(copies, [&](const auto& each) {
      return std::ranges::find(chains[i].values, each.first) == chains[i].values.end();
    });
    for (const size_t user : chains[i].users) replace_uses(graph.nodes[user], copies);
  }
  std::vector<Node> nodes;
  std::vector<bool> marked;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (Node& copy : before[i]) nodes.push_back(std::move(copy));
    marked.resize(nodes.size());
    nodes.push_back(std::move(graph.nodes[i]));
    marked.push_back(is_copied[i]);
  }
  graph.nodes = std::move(nodes);
  drop_unused(graph, marked);
  return made;
}

}  // namespace tessera::compiler
