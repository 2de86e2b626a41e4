#include <tessera/comm.h>

#include "base/environment.h"
#include "base/memory.h"
#include "comm/backends.h"
#include "comm/context.h"
#include "comm/diagnostics.h"
#include "comm/groups.h"
#include "comm/launch.h"
#include "comm/nccl/cuda_devices.h"
#include "comm/rendezvous.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

// For what is under way in all groups together when a rank leaves.
constexpr std::chrono::seconds kCloseGrace{10};
// How long rank 0 keeps the store for ranks that are still leaving.
constexpr std::chrono::milliseconds kLeaveGrace{2000};
constexpr std::chrono::milliseconds kStoppedTimeout{30'000};

/// A rank that forgets shutdown() still leaves its groups, so peers hear "left" and not "died".
void shut_down_at_exit() {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit(shutdown); });
}

/// Python does this at import; without it libtorch logs no less than a warning in a C++ program.
void read_log_level() {
  static std::once_flag once;
  std::call_once(once, [] { c10::initLogging(); });
}

void check_options(const InitOptions& options) {
  const auto present = comm::current_context();
  TORCH_CHECK(!present, "init: expected no world yet, but this rank is already rank ",
              present ? present->world.rank : 0, " of ", present ? present->world.world_size : 0,
              "; call tessera::shutdown() first to join another");
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "init: expected a timeout above 0, got ",
                    options.timeout.count(), " ms");
  TORCH_CHECK_VALUE(options.dump_signal >= 0 && options.dump_signal < NSIG,
                    "init: expected dump_signal to be a signal number or 0, got ",
                    options.dump_signal);
  TORCH_CHECK_VALUE(options.heartbeat_timeout.count() >= 0,
                    "init: expected a heartbeat_timeout of 0 or more, got ",
                    options.heartbeat_timeout.count(), " ms");
  TORCH_CHECK_VALUE(!options.stopped_timeout || options.stopped_timeout->count() >= 0,
                    "init: expected a stopped_timeout of 0 or more, got ",
                    options.stopped_timeout ? options.stopped_timeout->count() : 0, " ms");
  comm::read_backends(options.backend, "init");
}

/// The index of the CUDA device that the program or the launcher says is this rank's; none: the
/// ranks of a host take turns.
std::optional<int> find_device(const InitOptions& options, const comm::Launch& launch, int count) {
  TORCH_CHECK_VALUE(
      !options.device || count > 0, "init: expected no device, got ", options.device.value_or(0),
      ": there is no GPU, or it is hidden (CUDA_VISIBLE_DEVICES), or this libtorch has "
      "no CUDA; leave device out");
  TORCH_CHECK_VALUE(!options.device || (*options.device >= 0 && *options.device < count),
                    "init: expected device to be the index of a CUDA device, from 0 to ", count - 1,
                    ", got ", options.device.value_or(0));
  if (options.device || count == 0) return options.device;
  const int current = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice().index();
  if (current != 0) return current;
  if (launch.local_rank) return *launch.local_rank % count;
  return std::nullopt;
}

/// Makes it the calling thread's current one. CUDA is set up when it is first used, not here.
void use_device(comm::Context& context, int index) {
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
  c10::impl::VirtualGuardImpl(device.type()).uncheckedSetDevice(device);
  context.device = device;
}

std::chrono::milliseconds stopped_timeout(const InitOptions& options) {
  if (options.stopped_timeout) return *options.stopped_timeout;
  const auto milliseconds = Environment().get_int("TESSERA_STOPPED_TIMEOUT_MS");
  return std::chrono::milliseconds(milliseconds.value_or(kStoppedTimeout.count()));
}

}  // namespace

void init(InitOptions options) {
  read_log_level();
  check_options(options);
  Environment().get_int("TESSERA_LATE_AFTER");  // throws here rather than in the midst of a wait
  const auto launch = comm::find_launch(options);
  allow_warm_memory(options.keep_freed_memory);
  comm::set_stopped_timeout(stopped_timeout(options));
  const auto store = options.store ? options.store : comm::open_store(launch, options.timeout);
  auto context = std::make_shared<comm::Context>();
  auto devices = comm::cuda_device_uuids();
  const int device_count = static_cast<int>(devices.size());
  const auto device = find_device(options, launch, device_count);
  if (device) devices = {devices[*device]};
  context->world = comm::join_world(store, launch, options.timeout, devices);
  context->binds_device = options.device.has_value();
  if (device_count > 0)
    use_device(*context, device.value_or(context->world.local_rank % device_count));
  context->backend = options.backend;
  context->timeout = options.timeout;
  context->check_calls =
      options.check_calls && Environment().get("TESSERA_CHECK_CALLS").value_or("1") != "0";
  context->process = getpid();
  if (options.heartbeat_timeout.count() > 0 && comm::spans_hosts(context->world))
    context->heartbeat =
        std::make_shared<comm::Heartbeat>(context->world, options.heartbeat_timeout);
  std::vector<int> everybody(context->world.world_size);
  std::iota(everybody.begin(), everybody.end(), 0);
  try {
    context->default_group = comm::make_group(*context, everybody, "world", {});
  } catch (...) {
    comm::leave_world(context->world,
                      kLeaveGrace);  // so that another init in the same store meets no leftovers
    throw;
  }
  comm::set_current_context(context);
  shut_down_at_exit();
  comm::dump_on_signal(options.dump_signal);
  // Behind a pipe the C library would hold lines back until the rank ends, or lose them when it is
  // killed.
  if (launch.launcher == "tessera run") std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
}

void shutdown() {
  const auto context = comm::current_context();
  if (!context) return;
  comm::set_current_context(nullptr);
  if (context->process !=
      getpid()) {  // forked from a rank: its groups are not this process's to end
    for (const auto& group : context->groups) c10d::unregister_process_group(group->getGroupName());
    static_cast<void>(new std::shared_ptr<comm::Context>(context));
    return;
  }
  std::vector<Group> groups;
  {
    const std::lock_guard lock(context->mutex);
    groups = std::exchange(context->groups, {});
    context->mesh_groups.clear();
  }
  context->default_group.reset();
  const auto deadline = std::chrono::steady_clock::now() + kCloseGrace;
  for (const auto& group : groups) comm::begin_end(group, deadline);
  while (!groups.empty()) {
    try {
      comm::end_group(groups.back());
    } catch (const std::exception& error) {
      TORCH_WARN("shutdown: a group did not end cleanly: ", error.what());
    }
    groups.pop_back();
  }
  context->heartbeat.reset();
  comm::leave_world(context->world, kLeaveGrace);
}

bool is_initialized() { return comm::current_context() != nullptr; }
int rank() { return comm::require_context("rank")->world.rank; }
int world_size() { return comm::require_context("world_size")->world.world_size; }
int local_rank() { return comm::require_context("local_rank")->world.local_rank; }

}  // namespace tessera
