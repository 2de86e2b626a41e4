#include "comm/context.h"

#include <c10/util/Exception.h>

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
