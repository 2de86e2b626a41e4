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

}  // namespace tessera::compiler
