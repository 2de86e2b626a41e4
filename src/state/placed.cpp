#include "state/placed.h"

#include <tessera/dtensor.h>

#include "dtensor/packed_rows.h"
#include "dtensor/part.h"
#include "fully_shard/whole_value.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

namespace tessera::state {
namespace {

using dtensor::has_part;
using dtensor::part_of;

at::Tensor sorted_ranks(const DeviceMesh& mesh) {
  return std::get<0>(mesh.ranks().flatten().to(at::kLong).sort());
}

}  // namespace

void check_mesh(const char* function, const std::string& name, const at::Tensor& target,
                const at::Tensor& given) {
  if (!has_part(given)) return;
  const auto& from = part_of(given).spec->mesh;
  bool fits = part_of(given).spec->is_member;
  if (fits && has_part(target)) {
    const auto& to = part_of(target).spec->mesh;
    // Slices of one mesh are there on every rank.
    fits =
        from == to || from.root() == to.root() || at::equal(sorted_ranks(from), sorted_ranks(to));
  }
  TORCH_CHECK_VALUE(
      fits, function, ": expected a value for '", name, "' on a mesh of the ranks of ",
      has_part(target) ? c10::str(part_of(target).spec->mesh) : std::string("which this is one"),
      ", got one on ", c10::str(from),
      "; nothing was loaded; pass whole values, as FULL_STATE_DICT gives them");
}

void check_packed(const char* function, const std::string& name, const at::Tensor& target,
                  const at::Tensor& given, bool is_local) {
  const auto parts = dtensor::packed_parts(target);
  TORCH_CHECK_VALUE(
      parts == 1 || is_local || has_part(given), function, ": expected a distributed value for '",
      name, "', whose rows are packed in ", parts,
      " parts in the order of ranks, got a plain one, which does not say in which order its rows "
      "are; nothing was loaded; for the order in which the module was written pass "
      "distribute_tensor(pack_rows(value, ",
      parts, ", ranks), mesh, {Shard(0)}, std::nullopt)");
}

at::Tensor placed_like(const at::Tensor& target, const at::Tensor& given, bool is_local) {
  if (!has_part(target)) return has_part(given) ? DTensor::of(given).full_tensor() : given;
  const auto own = DTensor::of(target);
  if (!has_part(given) && is_local) {
    const auto& local = part_of(target).local();
    return dtensor::wrap(given.detach().to(local.options()), part_of(target).spec, target.sizes(),
                         target.strides());
  }
  if (has_part(given) && DTensor::of(given).mesh() == own.mesh())
    return DTensor::of(given).redistribute(own.placements());
  const auto whole = has_part(given) ? DTensor::of(given).full_tensor() : given;
  return sharded::placed_like(target, whole.detach().to(target.device()));
}

}  // namespace tessera::state
