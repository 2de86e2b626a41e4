#include "comm/foreground.h"

#include "comm/backends.h"

#include <sched.h>

#include <utility>

namespace tessera::comm {
namespace {

thread_local bool open = false;

}  // namespace

bool has_cores_to_spare(const Group& group) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int usable = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return usable >= 2 * group->getSize();
}

bool takes_turns(const Group& group) {
  return group->getSize() > 1 && shares_memory(*group, c10::kCPU) && !has_cores_to_spare(group);
}

ForegroundScope::ForegroundScope() : before_(std::exchange(open, true)) {}
ForegroundScope::~ForegroundScope() { open = before_; }
bool ForegroundScope::is_open() { return open; }

}  // namespace tessera::comm
