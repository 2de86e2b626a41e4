#include <tessera/comm.h>
#include <tessera/compile/data_parallel.h>

#include "compiler/spmd/batch_dims.h"
#include "compiler/spmd/expand.h"

#include <c10/util/Exception.h>

namespace tessera {

DataParallel::DataParallel(std::string parallel_style, DataParallelOptions options)
    : style_(std::move(parallel_style)), options_(std::move(options)) {
  TORCH_CHECK(
      style_ == "replicate" || style_ == "fully_shard" || style_ == "default",
      "DataParallel: expected parallel_style \"replicate\", \"fully_shard\" or \"default\", "
      "got \"",
      style_, "\"");
}

DeviceMesh DataParallel::mesh(c10::DeviceType device) const {
  return init_device_mesh(device, {world_size()}, {"dp"});
}

void DataParallel::partition(Graph& graph, const DeviceMesh& mesh) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      style_ != "default",
      "DataParallel: the style \"default\", which chooses by itself, is not "
      "there yet; take \"replicate\" or \"fully_shard\"");
  for (const auto& input : graph.inputs) {
    auto& type = graph.type(input.value);
    if (input.kind != InputKind::Argument) continue;
    const auto dims = static_cast<int64_t>(type.sizes.size());
    TORCH_CHECK_VALUE(options_.input_batch_dim < dims, "DataParallel: expected tensors with a ",
                      "batch dimension ", options_.input_batch_dim, ", but ", input.name, " has ",
                      dims, " dimensions; pass it from outside, or give another input_batch_dim");
    type.placement = Shard(options_.input_batch_dim);
  }
  compiler::note_batch_dims(graph);
  compiler::expand_to_spmd(graph, {.group = mesh.group()->getGroupName(),
                                   .ranks = mesh.size(),
                                   .rank = mesh.local_rank(),
                                   .shards = style_ == "fully_shard"});
}

}  // namespace tessera
