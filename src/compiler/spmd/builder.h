#pragma once

#include "compiler/spmd/expand.h"

namespace tessera::compiler {

/// Adds the nodes that move a value between ranks to a list of nodes under construction.
class SpmdBuilder {
 public:
  SpmdBuilder(Graph& graph, const SpmdSettings& settings) : graph_(graph), settings_(settings) {}

  /// Rows of a whole value of this type that a rank holds.
  int64_t local_rows(const ValueType& whole) const;
  ValueType local_type(const ValueType& whole) const;

  /// Of a whole value, with rows one after the other.
  static ValueType contiguous_type(ValueType whole);
  /// Whether a tensor of this type is a contiguous one, or a permutation of its dimensions.
  static bool fills_memory(const ValueType& type);

  /// Dimensions from the one with the largest stride to that with the smallest.
  static std::vector<int64_t> order_in_memory(const ValueType& type);

  /// Of a local gradient: the average of all, whole or this rank's rows of it.
  ValueId average(ValueId value);
  ValueId average_rows(ValueId value);
  /// Of this rank's rows: all rows.
  ValueId gather(ValueId value, const ValueType& whole);
  /// Of all rows: this rank's.
  ValueId slice(ValueId value);
  /// The same values in memory of their own.
  ValueId copied(ValueId value);
  ValueId contiguous(ValueId value);
  /// Of a contiguous value: with the strides of `whole`, which fills its memory.
  ValueId laid_out(ValueId value, const ValueType& whole);

  void add(Node node) { nodes_.push_back(std::move(node)); }
  std::vector<Node> take() { return std::move(nodes_); }

 private:
  int64_t chunk(int64_t rows) const { return (rows + settings_.ranks - 1) / settings_.ranks; }
  ValueId emit(const char* op, std::vector<Argument> arguments, ValueType type);
  ValueId divided(ValueId value);
  ValueId padded(ValueId value, int64_t rows);
  ValueId rows(ValueId value, int64_t begin, int64_t end);
  ValueId waited(ValueId value);

  Graph& graph_;
  const SpmdSettings& settings_;
  std::vector<Node> nodes_;
};

}  // namespace tessera::compiler
