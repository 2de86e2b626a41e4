#pragma once

#include <tessera/compile/graph.h>

namespace tessera::compiler {

/// What of a step of one rank is that rank's alone: all that depends on its part of the batch, but
/// for gradients, which are averaged at tessera::gradient nodes. Arguments that are placed
/// Replicate have no such part. Buffers that are written with such values are; other buffers and
/// tensors from outside are taken to be alike on all ranks.
class Locality {
 public:
  explicit Locality(const Graph& graph);

  bool is_local(ValueId value) const { return local_.at(static_cast<size_t>(value)); }
  /// Of a tessera::gradient node: a later backward of the step adds to what it gives, which serves
  /// nothing else, so that it is enough to average the sum.
  bool is_summand(const Node& mark) const;

 private:
  void find_summands(const Graph& graph);
  void follow(const Graph& graph);
  bool depends_on_local(const Node& node) const;
  /// Whether there was one more input to mark.
  bool mark_written(const Graph& graph);

  std::vector<bool> local_;     // by value
  std::vector<bool> summands_;  // by value: the result of such a node
};

/// Throws a ValueError that names the first parameter or state that the step would leave different
/// on each rank.
void check_updates(const Graph& graph, const Locality& locality);

}  // namespace tessera::compiler
