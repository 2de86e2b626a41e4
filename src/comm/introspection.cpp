// What a rank can say about its groups, and memory that belongs to one.
#include <tessera/comm.h>

#include "comm/backends.h"
#include "comm/context.h"
#include "comm/recorded.h"
#include "comm/shm/shared_tensor.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

namespace tessera {

std::vector<int> ranks(const Group& group) {
  const auto used = comm::resolve(group, "ranks");
  const auto context = comm::require_context("ranks");
  const std::lock_guard lock(context->mutex);
  const auto known = context->group_ranks.find(used->getGroupName());
  TORCH_CHECK_VALUE(known != context->group_ranks.end(),
                    "ranks: expected a group made by init or new_group, got '",
                    used->getGroupName(), "'");
  return known->second;
}

at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options,
                        const Group& group) {
  if (comm::shares_memory(*comm::resolve(group, "empty_shared"), c10::kCPU))
    return comm::shm::make_shared_tensor(sizes, options);
  return at::empty(sizes, options);
}

std::string recent_collectives() {
  const auto context = comm::current_context();
  if (!context) return "tessera: no recent collectives: not initialised\n";
  std::vector<Group> groups;
  {
    const std::lock_guard lock(context->mutex);
    groups = context->groups;
  }
  std::string text;
  for (const auto& group : groups) {
    std::set<c10d::Backend*> backends;  // one may serve several devices
    for (const auto device : group->getDeviceTypes()) {
      const auto backend = group->getBackend(device.type());
      if (!backends.insert(backend.get()).second) continue;
      const auto* recorded = dynamic_cast<const comm::Recorded*>(backend.get());
      text += recorded ? recorded->recent()
                       : "tessera: group '" + group->getGroupName() + "' (" +
                             backend->getBackendName() + ") keeps no record\n";
    }
  }
  return text;
}

}  // namespace tessera
