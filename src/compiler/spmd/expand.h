#pragma once

#include <tessera/compile/graph.h>

#include "dtensor/sharding.h"

namespace tessera::compiler {

/// The ranks that a step is made data parallel over, and how.
struct SpmdSettings {
  std::string group;  // by its name in c10d's registry
  int64_t ranks = 1;
  int64_t rank = 0;
  bool shards = false;  // parameters and optimizer state are cut along their first dimension
};

/// Turns a step of one rank, on its part of the batch, into this rank's part of a step of all:
/// gradients are averaged where the step has them as a whole (at the last tessera::gradient node of
/// several backwards), and if parameters are sharded, the update runs on shards and forward and
/// backward on what is gathered. Inputs get their placements, and shards their sizes. Throws a
/// ValueError if the step would leave parameters or state different on each rank.
///
/// Note [classes of values]: what depends on the rank's part of the batch is local (Locality), and
/// an operator that is given any of it works on whole values. Of the rest, optimizer state and
/// averaged gradients are of the update, parameters are parameters, and others (buffers, tensors
/// from outside, literals) need not be alike on all ranks. An elementwise operator, as those of
/// optimizers are, works on shards if something of the update is among its arguments, or
/// parameters and numbers alone. It cuts those arguments whose rows are rows of the result; what is
/// broadcast over the rows stays whole. What it gives is of the class of its first argument, which
/// is what an optimizer writes: of a parameter and state or a gradient comes a parameter.
void expand_to_spmd(Graph& graph, const SpmdSettings& settings);

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
  /// The rows of every rank but the last.
  int64_t chunk(int64_t rows) const { return dtensor::chunk_of(rows, settings_.ranks, 0).length; }
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
