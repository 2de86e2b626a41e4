#include "fully_shard/whole_value.h"

#include <tessera/dtensor.h>

#include "base/same_storage.h"
#include "dtensor/part.h"

#include <ATen/ATen.h>

namespace tessera::sharded {

using dtensor::has_part;
using dtensor::part_of;

at::Tensor whole_copy(const at::Tensor& tensor, bool to_cpu) {
  const auto whole =
      has_part(tensor) ? DTensor::of(tensor.detach()).full_tensor() : tensor.detach();
  const auto copy = to_cpu ? whole.to(at::kCPU) : whole;
  return same_storage(copy, has_part(tensor) ? part_of(tensor).local() : tensor) ? copy.clone()
                                                                                 : copy;
}

at::Tensor placed_like(const at::Tensor& target, const at::Tensor& whole) {
  if (!has_part(target)) return whole;
  const auto& spec = *part_of(target).spec;
  return distribute_tensor(whole, spec.mesh, spec.placements, /*src_data_rank=*/std::nullopt);
}

}  // namespace tessera::sharded
