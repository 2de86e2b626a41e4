#include "compiler/ir/gradient_path.h"

#include "comm/backends.h"
#include "compiler/ir/operators.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>

namespace tessera::compiler {
namespace {

constexpr size_t kGradients = 1;  // which argument of a fused update

const Node& node_at(const Graph& graph, int index) {
  return graph.nodes[static_cast<size_t>(index)];
}

bool takes_turns(const std::string& group) {
  try {
    return comm::takes_turns(c10d::resolve_process_group(group));
  } catch (const c10::Error&) {
    return false;  // a graph that was read from a file
  }
}

/// Whether it combines tensors place by place, in messages that may as well be smaller.
bool reduces_in_turn(const Node& node) {
  return (is_all_reduce(node) || is_reduce_scatter(node)) && takes_turns(group_of(node));
}

/// Whether the node's result is its argument, element by element in the same order.
bool shows_all(const Graph& graph, const Node& node) {
  if (is_wait(node)) return true;
  if (!views_from_start(node) || node.used().size() != 1 || node.defined().size() != 1)
    return false;
  const auto& from = graph.type(node.used()[0]);
  const auto& to = graph.type(node.defined()[0]);
  return from.is_contiguous() && to.is_contiguous() && from.numel() == to.numel() &&
         from.dtype == to.dtype;
}

/// Whether the node reads what has been gathered, which may be other ranks' memory.
bool reads_gathered(const Graph& graph, const MemoryAnalysis& memory, const Node& node) {
  const auto is_gathered = [&](ValueId value) {
    const int made = memory.uses().definition(value);
    return made != Uses::kInput && is_gather(node_at(graph, made));
  };
  return std::ranges::any_of(node.used(), [&](ValueId value) {
    return std::ranges::any_of(memory.overlapping(value), is_gathered);
  });
}

}  // namespace

std::optional<GradientPath> find_gradient_path(const Graph& graph, const Uses& uses, int update,
                                               size_t place) {
  GradientPath path;
  ValueId value = node_at(graph, update).arguments.at(kGradients).values.at(place);
  for (int user = update;;) {
    const auto is_user = [&](int each) {
      return each == user || (user == update && each == uses.end());
    };
    if (!std::ranges::all_of(uses.users(value), is_user) ||
        std::ranges::count(node_at(graph, user).used(), value) != 1)
      return std::nullopt;
    const int index = uses.definition(value);
    if (index == Uses::kInput) return std::nullopt;
    const Node& made = node_at(graph, index);
    if (is_matrix_product(made)) {
      path.product = index;
      std::ranges::reverse(path.further);
      return path;
    }
    size_t member = 0;
    if (is_launch(made)) {
      if (path.launch >= 0 || !reduces_in_turn(made)) return std::nullopt;
      const auto defined = made.defined();
      member = static_cast<size_t>(std::ranges::find(defined, value) - defined.begin());
      path.launch = index;
      path.member = member;
    } else if (!shows_all(graph, made)) {
      return std::nullopt;
    }
    path.further.push_back(index);
    value = made.used().at(member);
    user = index;
  }
}

int64_t parts_of_reduction(const Node& launch) {
  return is_reduce_scatter(launch) ? launch.arguments.at(2).constant.toInt() : 1;
}

bool goes_by_rows(const Graph& graph, const MemoryAnalysis& memory, const GradientPath& path,
                  const Node& update) {
  const Node& product = node_at(graph, path.product);
  const auto& whole = graph.type(product.defined()[0]);
  const auto& own = graph.type(update.arguments.at(kGradients).values.at(0));
  if (!whole.device.is_cpu() || !whole.is_contiguous() || whole.numel() == 0 ||
      !own.is_contiguous() || own.sizes.size() != 2)
    return false;
  int64_t parts = 1;
  if (path.launch >= 0) {
    parts = parts_of_reduction(node_at(graph, path.launch));
    // Every block reads all of the right factor: of a long sum that is more than it saves.
    constexpr int64_t kLeast = 8;
    if (kLeast * graph.type(product.used()[1]).numel() > whole.numel()) return false;
    if (writes(update, kGradients)) return false;  // to divide them, for the caller to see
  }
  if (own.sizes[0] * parts != whole.sizes[0] || own.sizes[1] != whole.sizes[1]) return false;
  // Parameter and state lie as the gradient does; what else it takes belongs to all rows.
  for (const ValueId value : update.used()) {
    const auto& other = graph.type(value);
    if (other.sizes == own.sizes ? !other.is_contiguous() : other.numel() != 1) return false;
  }
  return !reads_gathered(graph, memory, product);
}

}  // namespace tessera::compiler
