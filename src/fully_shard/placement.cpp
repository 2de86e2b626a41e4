#include "fully_shard/placement.h"

#include "dtensor/part.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera::sharded {
namespace {

using dtensor::Spec;
using dtensor::SpecPtr;

/// The mesh with the dimensions of both, which are slices of one.
DeviceMesh joined_mesh(const DeviceMesh& data, const DeviceMesh& tensor, const std::string& name) {
  const auto root = data.root();
  auto names = data.dim_names();
  const auto& others = tensor.dim_names();
  const bool is_sliced = root == tensor.root() && !names.empty() && !others.empty() &&
                         std::none_of(others.begin(), others.end(), [&](const auto& other) {
                           return std::find(names.begin(), names.end(), other) != names.end();
                         });
  TORCH_CHECK_VALUE(is_sliced, "fully_shard: expected the mesh ", c10::str(data),
                    " and that of the tensor parallel parameter '", name, "', ", c10::str(tensor),
                    ", to be different dimensions of one mesh; make one with "
                    "init_device_mesh(device, shape, {\"dp\", \"tp\"}) and pass its slices");
  names.insert(names.end(), others.begin(), others.end());
  return root[names];
}

}  // namespace

SpecPtr outside_spec(const at::Tensor& parameter, const std::string& name, const DeviceMesh& mesh,
                     std::optional<int64_t> shard_dim) {
  const bool is_distributed = dtensor::has_part(parameter);
  const auto whole =
      is_distributed ? joined_mesh(mesh, dtensor::part_of(parameter).spec->mesh, name) : mesh;
  Placements placements(static_cast<size_t>(whole.ndim()));
  const auto& names = whole.dim_names();
  const auto position = [&](const DeviceMesh& part, size_t dim) -> size_t {
    if (!is_distributed) return dim;
    const auto found = std::find(names.begin(), names.end(), part.dim_names()[dim]);
    return static_cast<size_t>(found - names.begin());
  };
  if (is_distributed) {
    const Spec& spec = *dtensor::part_of(parameter).spec;
    for (size_t dim = 0; dim < spec.placements.size(); ++dim)
      placements[position(spec.mesh, dim)] = spec.placements[dim];
  }
  const auto shape = whole.shape();
  if (shard_dim && parameter.dim() > 0) {
    const auto last = position(mesh, static_cast<size_t>(mesh.ndim() - 1));
    placements[last] = dtensor::shard_last(placements, shape, last, *shard_dim);
  }
  return dtensor::make_spec(whole, dtensor::canonical(placements, shape));
}

}  // namespace tessera::sharded
