#include <tessera/fully_shard/options.h>

#include "fully_shard/init.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <mutex>
#include <string>
#include <unordered_map>

namespace tessera::detail::fully_shard {
namespace {

struct KnownMesh {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  DeviceMesh mesh;
};

/// Of this rank and group.
DeviceMesh mesh_of(const Group& group, c10::DeviceType device) {
  static std::mutex mutex;
  static auto& known = *new std::unordered_map<const c10d::ProcessGroup*, KnownMesh>();
  {
    const std::lock_guard lock(mutex);
    std::erase_if(known, [](const auto& entry) { return entry.second.group.expired(); });
    const auto found = known.find(group.get());
    if (found != known.end() && found->second.mesh.device_type() == device)
      return found->second.mesh;
  }
  const auto members = ranks(group);
  const DeviceMesh mesh(device, std::vector<int64_t>(members.begin(), members.end()));
  const std::lock_guard lock(mutex);
  known.insert_or_assign(group.get(),
                         KnownMesh{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), mesh});
  return mesh;
}

bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::HYBRID_SHARD ||
         strategy == ShardingStrategy::HYBRID_SHARD_ZERO2;
}

void check_mesh(const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(!options.process_group || !options.mesh,
                    "fully_shard: expected a process_group or a mesh, got both; leave one out");
  if (options.mesh) {
    const auto ndim = options.mesh->ndim();
    TORCH_CHECK_VALUE(ndim == 1 || ndim == 2,
                      "fully_shard: expected a mesh of one dimension, or of two (copies, shards), "
                      "got one of ",
                      ndim, "; slice it first, e.g. mesh[\"dp\"]");
    TORCH_CHECK_VALUE(options.mesh->coordinate().has_value(),
                      "fully_shard: expected a mesh that this rank is part of, got ",
                      c10::str(*options.mesh));
    TORCH_CHECK_VALUE(ndim == 1 || options.strategy != ShardingStrategy::NO_SHARD,
                      "fully_shard: expected a 1-D mesh for NO_SHARD, got a 2-D one");
  }
  TORCH_CHECK_VALUE(!is_hybrid(options.strategy) || (options.mesh && options.mesh->ndim() == 2),
                    "fully_shard: expected a 2-D mesh (copies, shards) for HYBRID_SHARD, got ",
                    options.mesh ? c10::str(*options.mesh) : std::string("none"),
                    "; make one with init_device_mesh(device, {copies, shards})");
  TORCH_CHECK(options.mesh || options.process_group || is_initialized(),
              "fully_shard: expected tessera::init() to have been called, or a process_group or "
              "mesh in the options; call tessera::init() at the start of the program");
}

/// None if it is not a number.
std::optional<int64_t> neighbours_in(const FullyShardOptions& options) {
  return options.reshard_after_forward ? options.reshard_after_forward->ranks() : std::nullopt;
}

}  // namespace

void check_options(const FullyShardOptions& options) {
  check_mesh(options);
  const auto number = neighbours_in(options);
  if (!number) return;
  const auto shards = options.mesh ? options.mesh->size(options.mesh->ndim() - 1)
                                   : int64_t{world_size(options.process_group)};
  TORCH_CHECK_VALUE(*number >= 2 && shards % *number == 0,
                    "fully_shard: expected reshard_after_forward to be true, false or a number of "
                    "at least 2 ranks that divides the ",
                    shards, " over which parameters are sharded, got ", *number,
                    *number >= 2 ? "; take a divisor"
                                 : "; write true to free what was gathered, or false to keep it");
}

DeviceMesh mesh_for(const FullyShardOptions& options, c10::DeviceType device) {
  if (options.mesh) return *options.mesh;
  return mesh_of(options.process_group ? options.process_group : default_group(), device);
}

Group neighbours_for(const FullyShardOptions& options, const DeviceMesh& mesh) {
  const auto number = neighbours_in(options);
  const auto shards = mesh.size(mesh.ndim() - 1);
  if (!number || *number == shards || options.strategy == ShardingStrategy::NO_SHARD) return {};
  const auto blocks = mesh.ranks().reshape({-1, shards / *number, *number});
  return DeviceMesh(mesh.device_type(), blocks).group(2);
}

}  // namespace tessera::detail::fully_shard
