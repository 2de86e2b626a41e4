#include "dtensor/dispatch_log.h"

#include "dtensor/scopes.h"

namespace tessera::dtensor {

void DispatchCounts::add(const c10::OperatorName& name, bool has_rule, bool is_sharded) {
  const std::lock_guard lock(mutex_);
  auto& entry =
      entries_[name.overload_name.empty() ? name.name : name.name + "." + name.overload_name];
  ++entry.calls;
  if (!has_rule) ++entry.without_rule;
  if (is_sharded) ++entry.kept_sharded;
}

void DispatchCounts::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
}

DispatchLog::DispatchLog()
    : counts_(std::make_shared<DispatchCounts>()),
      scope_(open_scope([this](Scopes& scopes) { scopes.dispatch_counts = counts_; })) {}
DispatchLog::~DispatchLog() = default;

}  // namespace tessera::dtensor
