#pragma once

#include "dtensor/rules.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/function_schema.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <functional>
#include <memory>
#include <vector>

/// What scopes have switched, for this thread and for those in which autograd runs its backward.
namespace tessera::dtensor {

class CommCounts;
class DispatchCounts;

/// Never changed once it is in force, as threads share it: a scope brings a changed copy.
struct Scopes : c10::DebugInfoBase {
  bool replicates_implicitly = false;  // ImplicitReplication
  bool is_strict = false;              // StrictSharding
  const RuleTable* rules = nullptr;    // of loss_parallel; they stand before the registered ones
  std::vector<std::shared_ptr<CommCounts>> comm_counts;  // of comm_debug, the outermost first
  std::shared_ptr<DispatchCounts> dispatch_counts;       // of the innermost DispatchLog
};

/// Those in force.
const Scopes& scopes();
/// Until the guard ends, which must be in reverse order of others of this thread: scopes() with
/// this change.
c10::DebugInfoGuard open_scope(const std::function<void(Scopes&)>& change);

/// One warning per operator, or an error inside StrictSharding.
void note_missing_rule(const c10::FunctionSchema& schema);

/// Operators on parts, while it lives: autograd and autocast have had their turn with the whole.
class LocalScope {
  const c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

}  // namespace tessera::dtensor
