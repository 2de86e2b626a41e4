#pragma once

#include <tessera/comm.h>
#include <tessera/compile/data_parallel.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::compiler {

struct OneDeviceSettings {
  bool shards = false;  // parameters and optimizer state are cut along their first dimension
  bool returns_dtensors = false;
  OnMix on_mix = OnMix::Gather;
};

/// Turns a step that was captured on the whole batch, with placed arguments, into this rank's part
/// of it. Collective.
///
/// Note [as one device]: the graph is run once more, operator by operator, on distributed tensors,
/// and that run is recorded. So every operator means what it means on one device, by DTensor's own
/// rules, and what these do (local sizes, halves of means, collectives) is what the program does.
/// The batch-dimension analysis says where values are meant to be: results of what depends on the
/// batch are brought back to their batch dimension. Parameters that are sharded are gathered, once,
/// before they meet the batch; gradients are reduced to the placement of their parameter. Arguments
/// of ranks with parts of other lengths than the chunk rule gives are moved first, by rows.
void expand_as_one_device(Graph& graph, ParallelCall& call, const OneDeviceSettings& settings);

/// How much of a dimension of this size each rank has by DTensor's chunk rule.
std::vector<int64_t> chunk_lengths(int64_t size, int64_t ranks);

/// The ranks' parts of a dimension, which lie one after another, cut otherwise: `from` and `to` are
/// their lengths, by rank. Collective, in operators that are recorded.
at::Tensor move_rows(const at::Tensor& local, int64_t tensor_dim, const std::vector<int64_t>& from,
                     const std::vector<int64_t>& to, const Group& group);

}  // namespace tessera::compiler
