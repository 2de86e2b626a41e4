#include "comm/context.h"

#include <tessera/comm.h>

#include "comm/backend_interfaces.h"
#include "comm/backends.h"
#include "comm/shm/shared_memory.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <utility>

namespace tessera::comm {
namespace {

struct Slot {
  bool is_own = false;  // set by ContextScope: this thread plays a rank of its own
  std::shared_ptr<Context> context;
};
thread_local Slot thread_slot;

// Neither is ever destroyed: shutdown() empties the slot at exit, and a forked child must leave its
// parent's groups be.
std::mutex& process_mutex() {
  static auto& mutex = *new std::mutex();
  return mutex;
}
std::shared_ptr<Context>& process_slot() {
  static auto& context = *new std::shared_ptr<Context>();
  return context;
}

}  // namespace

std::shared_ptr<Context> current_context() {
  if (thread_slot.is_own) return thread_slot.context;
  const std::lock_guard lock(process_mutex());
  return process_slot();
}

void set_current_context(std::shared_ptr<Context> context) {
  if (thread_slot.is_own) {
    thread_slot.context = std::move(context);
    return;
  }
  const std::lock_guard lock(process_mutex());
  process_slot() = std::move(context);
}

std::shared_ptr<Context> require_context(const char* caller) {
  auto context = current_context();
  TORCH_CHECK(context, caller, ": expected tessera::init() to have been called, but this ",
              thread_slot.is_own ? "thread" : "process",
              " belongs to no world; call tessera::init() first (and use nothing after "
              "tessera::shutdown())");
  return context;
}

ContextScope::ContextScope(std::shared_ptr<Context> context)
    : previous_(std::move(thread_slot.context)), had_own_(thread_slot.is_own) {
  thread_slot = {.is_own = true, .context = std::move(context)};
}

ContextScope::~ContextScope() {
  thread_slot = {.is_own = had_own_, .context = std::move(previous_)};
}

}  // namespace tessera::comm

namespace tessera {

// What a rank can say about its groups, and memory that belongs to one.

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
      const auto* recorded = dynamic_cast<const comm::FlightRecorder*>(backend.get());
      text += recorded ? recorded->recent()
                       : "tessera: group '" + group->getGroupName() + "' (" +
                             backend->getBackendName() + ") keeps no record\n";
    }
  }
  return text;
}

}  // namespace tessera
