#pragma once

#include <tessera/compile/graph.h>

namespace tessera::compiler {

/// The ranks that a step is made data parallel over, and how.
struct SpmdSettings {
  std::string group;  // by its name in c10d's registry
  int64_t ranks = 1;
  int64_t rank = 0;
  bool shards = false;  // parameters and optimizer state are cut along their first dimension
};

/// Turns a step of one rank, on its part of the batch, into this rank's part of a step of all:
/// gradients are averaged where the step first has them (at tessera::gradient nodes), and if
/// parameters are sharded, the update runs on shards and forward and backward on what is gathered.
/// Inputs get their placements, and shards their sizes.
///
/// Note [classes of values]: a parameter or optimizer state comes in as such, a gradient comes from
/// a tessera::gradient node; everything else is an activation. An elementwise operator (those of
/// optimizers are) with a gradient or state among its arguments, or with parameters alone, works on
/// shards; any other operator gets whole values. What it is given decides what it gives: state, or
/// else a parameter, or else a gradient.
void expand_to_spmd(Graph& graph, const SpmdSettings& settings);

}  // namespace tessera::compiler
