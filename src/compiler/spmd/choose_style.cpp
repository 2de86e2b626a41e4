#include "compiler/spmd/choose_style.h"

#include <tessera/comm.h>

#include "base/text.h"
#include "dtensor/path.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace tessera::compiler {
namespace {

/// What a rank keeps from step to step, and what it sends in one, by style.
struct Demand {
  int64_t replicated_bytes = 0, sharded_bytes = 0;
  double replicated_cost = 0, sharded_cost = 0;
};

Demand demand_of(const Graph& graph, int64_t ranks) {
  const std::vector<int64_t> mesh_shape = {ranks};
  Demand demand;
  for (const auto& input : graph.inputs) {
    const auto& type = graph.type(input.value);
    const bool is_parameter = input.kind == InputKind::Parameter;
    if (!is_parameter && input.kind != InputKind::State) continue;
    const int64_t copies = is_parameter ? 2 : 1;  // it and its gradient
    const int64_t rows = type.sizes.empty() ? 1 : std::max<int64_t>(type.sizes[0], 1);
    const int64_t own = type.sizes.empty() ? 1 : dtensor::chunk_of(rows, ranks, 0).length;
    demand.replicated_bytes += copies * type.bytes();
    demand.sharded_bytes += copies * type.bytes() / rows * own;
    if (!is_parameter || type.sizes.empty()) continue;
    const dtensor::Layout layout{type.sizes, static_cast<int64_t>(c10::elementSize(type.dtype)),
                                 mesh_shape};
    const auto cost = [&](const Placement& from, const Placement& to) {
      return dtensor::find_path(layout, {from}, {to}).cost;
    };
    demand.replicated_cost += cost(Partial(), Replicate());
    demand.sharded_cost += cost(Partial(), Shard(0)) + cost(Shard(0), Replicate());
  }
  return demand;
}

int64_t free_bytes(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU)
    return static_cast<int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const auto current = at::accelerator::getDeviceIndex();
  return static_cast<int64_t>(at::accelerator::getMemoryInfo(current).first);
}

/// Ranks of one host share its memory; those of one GPU share that.
int64_t common_budget(const DeviceMesh& mesh) {
  const auto device = mesh.device_type();
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::string where = host.data();
  if (device != c10::DeviceType::CPU) where += c10::str(":", at::accelerator::getDeviceIndex());
  const auto all = gather_bytes(c10::str(free_bytes(device), "@", where), mesh.group());
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& entry : all) {
    const auto place = entry.substr(entry.find('@'));
    const auto sharing = std::count_if(all.begin(), all.end(), [&](const std::string& other) {
      return other.substr(other.find('@')) == place;
    });
    least = std::min<int64_t>(least, std::stoll(entry) / (2 * sharing));
  }
  return least;
}

}  // namespace

StyleChoice choose_style(const Graph& graph, const DeviceMesh& mesh,
                         std::optional<int64_t> budget) {
  const auto demand = demand_of(graph, mesh.size());
  const auto limit = budget ? *budget : common_budget(mesh);
  StyleChoice choice;
  choice.shards = demand.replicated_bytes > limit && demand.sharded_bytes < demand.replicated_bytes;
  const auto bytes = [](int64_t count) { return format_bytes(static_cast<size_t>(count)); };
  choice.why = c10::str(
      "DataParallel: \"default\" is \"", choice.shards ? "fully_shard" : "replicate",
      "\": parameters, gradients and optimizer state take ", bytes(demand.replicated_bytes),
      " on each rank if replicated, ", bytes(demand.sharded_bytes), " if sharded, of a budget of ",
      bytes(limit), "; messages cost ", static_cast<int64_t>(demand.replicated_cost), " against ",
      static_cast<int64_t>(demand.sharded_cost));
  return choice;
}

}  // namespace tessera::compiler
