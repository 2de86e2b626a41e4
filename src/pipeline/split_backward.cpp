#include "pipeline/split_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <utility>

namespace tessera::detail::pipeline {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using NodePtr = decltype(Edge::function);  // libtorch's versions differ

/// Which nodes of a graph lead to one of them. Without recursion: graphs are deep.
class Ways {
 public:
  Ways(const NodePtr& root, const Node* target) : target_(target) { visit(root); }

  bool leads(const Node* node) const {
    const auto found = leads_.find(node);
    return found != leads_.end() && found->second;
  }
  /// Nodes on the way from which edges lead elsewhere.
  std::vector<NodePtr> borders() const {
    std::vector<NodePtr> borders;
    for (const auto& node : order_) {
      if (!leads(node.get())) continue;
      for (const auto& edge : node->next_edges()) {
        if (!edge.is_valid() || leads(edge.function.get())) continue;
        borders.push_back(node);
        break;
      }
    }
    return borders;
  }

 private:
  void visit(const NodePtr& root) {
    std::vector<std::pair<NodePtr, size_t>> path;  // nodes and their next edge
    const auto enter = [&](const NodePtr& node) {
      if (leads_.emplace(node.get(), node.get() == target_).second) path.emplace_back(node, 0);
    };
    enter(root);
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < node->next_edges().size()) {
        const auto edge = node->next_edges()[next++];
        if (edge.is_valid()) enter(edge.function);
        continue;
      }
      for (const auto& edge : node->next_edges()) {
        if (edge.is_valid() && leads_[edge.function.get()]) leads_[node.get()] = true;
      }
      order_.push_back(node);
      path.pop_back();
    }
  }

  const Node* target_;
  std::unordered_map<const Node*, bool> leads_;
  std::vector<NodePtr> order_;
};

void cut(Node& border, const Ways& ways) {
  // A node has no way to lose an edge once others point to it; nobody but us has this graph.
  for (auto& edge : const_cast<edge_list&>(border.next_edges())) {
    if (edge.is_valid() && ways.leads(edge.function.get())) edge = Edge();
  }
}

}  // namespace

at::Tensor SplitBackward::backward_input(const at::Tensor& output, const at::Tensor& gradient,
                                         const at::Tensor& input) {
  const auto root = torch::autograd::impl::gradient_edge(output);
  const auto target = torch::autograd::impl::gradient_edge(input);
  const Ways ways(root.function, target.function.get());
  auto& engine = Engine::get_default_engine();
  if (!ways.leads(root.function.get())) {
    borders_ = {root};
    gradients_ = {gradient};
    return {};
  }
  edge_list asked{target};
  const auto borders = ways.borders();
  for (const auto& node : borders) {
    for (uint32_t i = 0; i < node->num_inputs(); ++i) asked.emplace_back(node, i);
  }
  auto results = engine.execute({root}, {gradient}, /*keep_graph=*/true, /*create_graph=*/false,
                                /*accumulate_grad=*/false, asked);
  for (size_t i = 1; i < asked.size(); ++i) {
    if (!results[i].defined()) continue;
    borders_.push_back(asked[i]);
    gradients_.push_back(results[i]);
  }
  for (const auto& node : borders) cut(*node, ways);
  return results[0];
}

void SplitBackward::backward_weight() {
  const auto borders = std::exchange(borders_, {});
  const auto gradients = std::exchange(gradients_, {});
  if (borders.empty()) return;
  Engine::get_default_engine().execute(borders, gradients, /*keep_graph=*/false,
                                       /*create_graph=*/false, /*accumulate_grad=*/true);
}

}  // namespace tessera::detail::pipeline
