#include "dtensor/dispatch_log.h"

#include <utility>

namespace tessera::dtensor {
namespace {

thread_local DispatchLog* innermost = nullptr;

}  // namespace

DispatchLog::DispatchLog() : previous_(std::exchange(innermost, this)) {}
DispatchLog::~DispatchLog() { innermost = previous_; }

DispatchLog* DispatchLog::current() { return innermost; }

void DispatchLog::add(const c10::OperatorName& name, bool has_rule, bool is_sharded) {
  auto& entry =
      entries_[name.overload_name.empty() ? name.name : name.name + "." + name.overload_name];
  ++entry.calls;
  if (!has_rule) ++entry.without_rule;
  if (is_sharded) ++entry.kept_sharded;
}

}  // namespace tessera::dtensor
