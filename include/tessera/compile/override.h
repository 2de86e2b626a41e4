#pragma once

#include <tessera/compile/graph.h>
#include <tessera/nn/hooks.h>

#include <string>
#include <vector>

namespace tessera {

/// Puts something that can be recorded in the place of modules that can't, while a step or a
/// forward is recorded, and may splice what it wants into the graph. Derive one:
///   struct Router : Override {
///     nn::ForwardStandIn replacement(const std::string& name, torch::nn::Module&) override {
///       if (name != "moe.router") return {};
///       return [](torch::nn::Module&, nn::Arguments& in) { return my::route(in.tensor(0)); };
///     }
///   };
class Override {
 public:
  virtual ~Override() = default;
  /// What runs in place of the forward of the module with this path; empty: forward itself. It
  /// gives what forward would give, as calls that are recorded have its result. The module is
  /// hookable and returns one tensor.
  virtual nn::ForwardStandIn replacement(const std::string& name, torch::nn::Module& module) = 0;
  /// Rewrites the captured graph, before any pass; in that of a step, Node::module names the module
  /// of a node.
  /// `flat_state`: those of the graph's inputs that are parameters, buffers and optimizer state, in
  /// order. Inputs and outputs stay as they are.
  virtual void transform(Graph& graph, const std::vector<GraphInput>& flat_state) {
    (void)graph;
    (void)flat_state;
  }
};

}  // namespace tessera
