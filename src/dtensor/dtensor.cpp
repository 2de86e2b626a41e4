// The public class: checks, then the parts below.
#include <tessera/dtensor.h>

#include "comm/type_names.h"
#include "dtensor/agreement.h"
#include "dtensor/autograd.h"
#include "dtensor/collectives.h"
#include "dtensor/registration.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>

namespace tessera {
namespace {

using dtensor::part_of;
using dtensor::Sizes;
using dtensor::SpecPtr;

void check_shapes(const at::Tensor& local, const FromLocalOptions& options) {
  TORCH_CHECK_VALUE(options.shape.has_value() == options.stride.has_value(),
                    "DTensor::from_local: expected shape and stride, or neither; got ",
                    options.shape ? "a shape alone" : "a stride alone");
  if (!options.shape) return;
  TORCH_CHECK_VALUE(options.shape->size() == options.stride->size() &&
                        static_cast<int64_t>(options.shape->size()) == local.dim(),
                    "DTensor::from_local: expected a shape and a stride of the local tensor's ",
                    local.dim(), " dimensions, got ", c10::IntArrayRef(*options.shape), " and ",
                    c10::IntArrayRef(*options.stride));
}

/// Elsewhere such a placement means the nearest one that there is; here it says how `local` was
/// cut.
void check_strides(const Placements& placements, c10::IntArrayRef mesh_shape) {
  const auto meant = dtensor::canonical(placements, mesh_shape);
  TORCH_CHECK_VALUE(placements == meant,
                    "DTensor::from_local: expected placements of a mesh of shape ", mesh_shape,
                    ", where strided shards follow those of mesh dimensions to the "
                    "right, got ",
                    c10::str(placements), "; these would mean ", c10::str(meant));
}

/// Whoever holds a part of another size takes the whole for another one.
void tell_sizes(const dtensor::Spec& spec, c10::IntArrayRef sizes) {
  for (size_t dim = 0; dim < spec.placements.size(); ++dim) {
    if (spec.placements[dim].is_shard() && spec.mesh_shape[dim] > 1)
      dtensor::tell_assumed_sizes(sizes, spec.mesh.group(static_cast<int64_t>(dim)));
  }
}

/// With `run_check`, a rank that can't take the placements tells the others, which wait for it.
SpecPtr from_local_spec(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                        bool run_check) {
  try {
    auto taken =
        dtensor::normalize("DTensor::from_local", std::move(placements), local.dim(), mesh.ndim());
    check_strides(taken, mesh.shape());
    return dtensor::make_spec(mesh, std::move(taken));
  } catch (const c10::ValueError& error) {
    if (!run_check || !mesh.coordinate()) throw;
    dtensor::agreed_sizes(local, *dtensor::make_spec(mesh, Placements(mesh.ndim())),
                          error.what_without_backtrace());
    throw;
  }
}

SpecPtr gradient_of(const char* caller, const SpecPtr& spec,
                    const std::optional<Placements>& placements, int64_t ndim) {
  if (!placements) return dtensor::without_partial(spec);
  return dtensor::make_spec(spec->mesh,
                            dtensor::normalize(caller, *placements, ndim, spec->mesh.ndim()));
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) { return dtensor::has_part(tensor); }

DTensor DTensor::of(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(is_dtensor(tensor), "DTensor::of: expected a distributed tensor, got ",
                   tensor.defined() ? c10::str("a plain one of sizes ", tensor.sizes())
                                    : std::string("an undefined one"),
                   "; distribute it with distribute_tensor or DTensor::from_local");
  return DTensor(tensor);
}

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                            FromLocalOptions options) {
  TORCH_CHECK_VALUE(local.defined(),
                    "DTensor::from_local: expected a tensor, got an undefined one");
  TORCH_CHECK_VALUE(!is_dtensor(local),
                    "DTensor::from_local: expected a plain tensor, got a distributed one; use "
                    "redistribute to place it otherwise");
  TORCH_CHECK_VALUE(local.layout() == c10::kStrided,
                    "DTensor::from_local: expected a dense tensor, got layout ", local.layout(),
                    "; call .to_dense() first");
  dtensor::ensure_registered();
  check_shapes(local, options);
  const auto spec = from_local_spec(local, mesh, std::move(placements), options.run_check);
  at::Tensor values;
  Sizes sizes;
  if (options.run_check && spec->is_member) {
    sizes = dtensor::agreed_sizes(local, *spec);
    values = dtensor::agreed_values(local, *spec);
  } else if (!options.shape) {
    sizes = dtensor::global_sizes_of_even(local.sizes(), spec->placements, spec->mesh_shape);
    if (spec->is_member) tell_sizes(*spec, sizes);
  }
  if (options.shape) sizes = *options.shape;
  const auto strides =
      options.stride ? *options.stride : dtensor::dense_strides_like(sizes, local.strides());
  if (options.shape && spec->is_member) {
    const auto expected = spec->local_sizes(sizes);
    TORCH_CHECK_VALUE(local.sizes() == c10::IntArrayRef(expected),
                      "DTensor::from_local: expected a local tensor of sizes ",
                      c10::IntArrayRef(expected), ", rank ", rank(), "'s part of ",
                      c10::IntArrayRef(sizes), " placed ", c10::str(spec->placements), ", got ",
                      local.sizes());
  }
  return DTensor(dtensor::from_local(
      local, spec, sizes, strides,
      gradient_of("DTensor::from_local", spec, options.grad_placements, local.dim()), values));
}

at::Tensor DTensor::to_local(const std::optional<Placements>& grad_placements) const {
  const auto self = of(*this);
  return dtensor::to_local(
      self, gradient_of("DTensor::to_local", part_of(self).spec, grad_placements, self.dim()));
}

DTensor DTensor::redistribute(Placements placements, bool async_op) const {
  const auto self = of(*this);
  const auto& spec = part_of(self).spec;
  const auto to = dtensor::normalize("DTensor::redistribute", std::move(placements), self.dim(),
                                     spec->mesh.ndim());
  for (size_t dim = 0; dim < to.size(); ++dim) {
    TORCH_CHECK_VALUE(!to[dim].is_partial() || to[dim] == spec->placements[dim],
                      "DTensor::redistribute: expected Shard or Replicate on mesh dimension ", dim,
                      ", got ", c10::str(to[dim]), " for a tensor placed ",
                      c10::str(spec->placements),
                      "; only operators make partial results (DTensor::from_local can say that ",
                      "local tensors are such)");
  }
  return DTensor(dtensor::redistribute(
      self, dtensor::make_spec(spec->mesh, dtensor::canonical(to, spec->mesh_shape)), async_op));
}

DTensor DTensor::redistribute(const DeviceMesh& mesh, Placements placements, bool async_op) const {
  const auto& own = part_of(of(*this)).spec->mesh;
  TORCH_CHECK_NOT_IMPLEMENTED(mesh == own, "DTensor::redistribute: expected the tensor's own mesh ",
                              c10::str(own), ", got ", c10::str(mesh),
                              "; gather it with full_tensor() and distribute it over the other");
  return redistribute(std::move(placements), async_op);
}

at::Tensor DTensor::full_tensor(const std::optional<Placements>& grad_placements) const {
  const auto self = of(*this);
  return redistribute(Placements(part_of(self).spec->placements.size())).to_local(grad_placements);
}

const DeviceMesh& DTensor::mesh() const { return part_of(of(*this)).spec->mesh; }

const Placements& DTensor::placements() const { return part_of(of(*this)).spec->placements; }

std::vector<TensorShard> DTensor::shards() const {
  const auto self = of(*this);
  const auto& spec = *part_of(self).spec;
  const auto ranks = spec.mesh.ranks().reshape({-1});
  std::vector<TensorShard> shards;
  for (const auto& coordinate : dtensor::coordinates_of(spec.mesh_shape)) {
    TensorShard shard;
    for (const auto& chunk :
         dtensor::local_box(self.sizes(), spec.placements, spec.mesh_shape, coordinate)) {
      shard.offset.push_back(chunk.offset);
      shard.length.push_back(chunk.length);
    }
    shard.owner = static_cast<int>(ranks[static_cast<int64_t>(shards.size())].item<int64_t>());
    shards.push_back(std::move(shard));
  }
  return shards;
}

std::ostream& operator<<(std::ostream& out, const DTensor& tensor) {
  if (!is_dtensor(tensor)) return out << static_cast<const at::Tensor&>(tensor);
  out << "DTensor(" << tensor.sizes() << ", " << comm::name_of_dtype(tensor.scalar_type()) << ", "
      << tensor.mesh() << ", " << tensor.placements() << "), this rank's part:\n";
  return out << part_of(tensor).local();
}

}  // namespace tessera
