#include "dtensor/spec.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

namespace tessera::dtensor {
namespace {

std::vector<Group> groups_of(const DeviceMesh& mesh) {
  std::vector<Group> groups;
  if (!mesh.coordinate()) return groups;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) groups.push_back(mesh.group(dim));
  return groups;
}

bool all_replicated(const Placements& placements, const std::vector<int64_t>& mesh_shape) {
  for (size_t dim = 0; dim < placements.size(); ++dim) {
    if (mesh_shape[dim] > 1 && !placements[dim].is_replicate()) return false;
  }
  return true;
}

size_t hash_of(const DeviceMesh& mesh, const Placements& placements) {
  size_t hash = std::hash<DeviceMesh>()(mesh);
  for (const auto& placement : placements) {
    hash = c10::hash_combine(
        hash, c10::get_hash(static_cast<int>(placement.kind()), placement.dim(),
                            placement.split_factor(), static_cast<int>(placement.reduce_op())));
  }
  return hash;
}

/// Meshes of ranks that are threads of one process look alike but for the rank that holds them, and
/// those of an earlier world but for their groups.
bool is_same(const Spec& spec, const DeviceMesh& mesh, const Placements& placements) {
  if (!(spec.placements == placements && spec.mesh == mesh)) return false;
  const auto coordinate = mesh.coordinate();
  if (spec.is_member != coordinate.has_value()) return false;
  if (!coordinate) return true;
  if (spec.coordinate != *coordinate) return false;
  for (size_t dim = 0; dim < spec.groups.size(); ++dim) {
    if (spec.groups[dim] != mesh.group(static_cast<int64_t>(dim))) return false;
  }
  return true;
}

/// Specs that somebody holds.
struct SpecTable {
  std::mutex mutex;
  std::unordered_multimap<size_t, c10::weak_intrusive_ptr<Spec>> specs;
};

SpecTable& table() {
  static auto* const kTable = new SpecTable;  // outlives the tensors of static variables
  return *kTable;
}

}  // namespace

Spec::Spec(DeviceMesh mesh_, Placements placements_, uint64_t id_)
    : mesh(std::move(mesh_)),
      placements(std::move(placements_)),
      id(id_),
      mesh_shape(mesh.shape()),
      is_member(mesh.coordinate().has_value()),
      coordinate(mesh.coordinate().value_or(std::vector<int64_t>{})),
      groups(groups_of(mesh)),
      has_partial(std::any_of(placements.begin(), placements.end(),
                              [](const auto& placement) { return placement.is_partial(); })),
      is_replicated(all_replicated(placements, mesh_shape)) {}

Sizes Spec::local_sizes(c10::IntArrayRef sizes) const {
  return dtensor::local_sizes(sizes, placements, mesh_shape, coordinate);
}

SpecPtr make_spec(const DeviceMesh& mesh, const Placements& placements) {
  static std::atomic<uint64_t> next_id = 1;
  // Most calls ask for one of a few specs, again and again.
  thread_local c10::weak_intrusive_ptr<Spec> last{SpecPtr()};
  if (auto spec = last.lock(); spec && is_same(*spec, mesh, placements)) return spec;

  auto& known = table();
  const size_t hash = hash_of(mesh, placements);
  const std::lock_guard lock(known.mutex);
  auto [begin, end] = known.specs.equal_range(hash);
  while (begin != end) {
    auto spec = begin->second.lock();
    if (!spec) {
      begin = known.specs.erase(begin);
      continue;
    }
    if (is_same(*spec, mesh, placements)) {
      last = c10::weak_intrusive_ptr<Spec>(spec);
      return spec;
    }
    ++begin;
  }
  auto spec = c10::make_intrusive<Spec>(mesh, placements, next_id++);
  known.specs.emplace(hash, c10::weak_intrusive_ptr<Spec>(spec));
  last = c10::weak_intrusive_ptr<Spec>(spec);
  return spec;
}

SpecPtr replicated(const Spec& spec) {
  return make_spec(spec.mesh, Placements(spec.placements.size()));
}

SpecPtr without_partial(const SpecPtr& spec) {
  if (!spec->has_partial) return spec;
  auto placements = spec->placements;
  for (auto& placement : placements) {
    if (placement.is_partial()) placement = Replicate();
  }
  return make_spec(spec->mesh, placements);
}

void check_one_mesh(const std::string& caller, const Spec& left, const Spec& right) {
  TORCH_CHECK_VALUE(left.mesh == right.mesh, caller,
                    ": expected distributed tensors on one mesh, got ", c10::str(left.mesh),
                    " and ", c10::str(right.mesh),
                    "; redistribute them over one mesh, or compute with to_local()");
}

}  // namespace tessera::dtensor
