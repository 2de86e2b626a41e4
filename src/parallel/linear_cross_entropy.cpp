// linear_cross_entropy of a head whose classes are sharded over the ranks of a mesh.
#include <tessera/dtensor.h>

#include "dtensor/collectives.h"
#include "dtensor/packed_rows.h"
#include "dtensor/sharding.h"
#include "nn/class_shard.h"
#include "parallel/checked_targets.h"

#include <c10/util/Exception.h>

namespace tessera::parallel {
namespace {

constexpr const char* kRemedy =
    "; for others use cross_entropy under loss_parallel, for a replicated one its to_local()";

/// The classes of all ranks but the last.
int64_t most_classes(const DTensor& head) {
  const auto ranks = head.mesh().size();
  return (head.size(0) + ranks - 1) / ranks;
}

void check_head(const at::Tensor& weight, const at::Tensor& bias) {
  TORCH_CHECK_TYPE(is_dtensor(weight) && (!bias.defined() || is_dtensor(bias)),
                   "linear_cross_entropy: expected the weight, and its bias, to be DTensors like "
                   "the rest, got plain ones; for those pass to_local() of input and target");
  const auto head = DTensor::of(weight);
  TORCH_CHECK_NOT_IMPLEMENTED(
      head.mesh().ndim() == 1 && head.placements() == Placements{Shard(0)} &&
          dtensor::packed_parts(weight) == 1,
      "linear_cross_entropy: expected a weight whose classes are sharded over a 1-D mesh, "
      "Shard(0), with rows in their own order, got ",
      c10::str(head.placements()), " on ", head.mesh(), kRemedy);
  if (bias.defined()) {
    const auto placed = DTensor::of(bias);
    TORCH_CHECK_VALUE(placed.mesh() == head.mesh() && placed.placements() == head.placements(),
                      "linear_cross_entropy: expected a bias placed as the weight, Shard(0), got ",
                      c10::str(placed.placements()), " on ", placed.mesh());
  }
  const auto ranks = head.mesh().size(), classes = weight.size(0);
  TORCH_CHECK_VALUE(most_classes(head) * (ranks - 1) < classes,
                    "linear_cross_entropy: expected at least one class on each rank, got ", classes,
                    " on ", ranks, " ranks", kRemedy);
}

DTensor replicated(const at::Tensor& tensor, const DeviceMesh& mesh) {
  if (!is_dtensor(tensor)) return DTensor::from_local(tensor, mesh);
  const auto placed = DTensor::of(tensor);
  TORCH_CHECK_VALUE(placed.mesh() == mesh, "linear_cross_entropy: expected tensors on ", mesh,
                    ", that of the weight, got one on ", placed.mesh());
  return placed.redistribute({Replicate()});
}

at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight,
                                const at::Tensor& target,
                                const nn::LinearCrossEntropyOptions& options) {
  check_head(weight, options.bias);
  const auto head = DTensor::of(weight);
  const auto& mesh = head.mesh();
  auto local = options;
  if (local.bias.defined()) local.bias = DTensor::of(local.bias).to_local();
  auto targets = replicated(target, mesh).to_local();
  // One rank alone finds a target's logit, so none of the others would see a wrong one.
  if (targets.scalar_type() == at::kLong)  // others are refused below
    targets = checked_targets(targets, weight.size(0), options.ignore_index);
  const auto reduce = [group = mesh.group()](ReduceOp::RedOpType op) {
    return [group, op](const at::Tensor& tensor) {
      return dtensor::reduce_all(tensor, op, group).wait();
    };
  };
  const auto chunk =
      dtensor::local_chunk(weight.size(0), 0, head.placements(), mesh.shape(), *mesh.coordinate());
  return nn::detail::linear_cross_entropy_of_shard(
      replicated(input, mesh).to_local(Placements{Partial()}), head.to_local(), targets, local,
      {.first = chunk.offset,
       .most = most_classes(head),
       .largest = reduce(ReduceOp::MAX),
       .sum = reduce(ReduceOp::SUM)});
}

[[maybe_unused]] const bool kIsSet = [] {
  nn::detail::set_distributed_linear_cross_entropy(&linear_cross_entropy);
  return true;
}();

}  // namespace
}  // namespace tessera::parallel
