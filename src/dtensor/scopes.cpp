#include "dtensor/scopes.h"

#include <tessera/dtensor/tools.h>

#include <c10/util/Exception.h>

#include <mutex>
#include <set>
#include <string>

namespace tessera {
namespace dtensor {
namespace {

// As capture::observer(): libtorch hands this on to the threads in which backward runs on a GPU.
c10::DebugInfoKind kind_of_scopes() { return c10::DebugInfoKind::INFERENCE_CONTEXT; }

}  // namespace

const Scopes& scopes() {
  static const auto& kNone = *new Scopes;
  const auto* current =
      static_cast<const Scopes*>(c10::ThreadLocalDebugInfo::get(kind_of_scopes()));
  return current == nullptr ? kNone : *current;
}

c10::DebugInfoGuard open_scope(const std::function<void(Scopes&)>& change) {
  auto changed = std::make_shared<Scopes>(scopes());
  change(*changed);
  return c10::DebugInfoGuard(kind_of_scopes(), std::move(changed));
}

void note_missing_rule(const c10::FunctionSchema& schema) {
  const auto& name = schema.operator_name();
  const auto text = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !scopes().is_strict, text,
      ": there is no sharding rule for this operator and StrictSharding is ",
      "on; redistribute its inputs to Replicate yourself, or add a rule (docs/adding.md)");
  static std::mutex mutex;
  static auto* const kNamed = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (kNamed->insert(text).second)
    TORCH_WARN(text, ": no sharding rule; its inputs are gathered on every rank");
}

}  // namespace dtensor

ImplicitReplication::ImplicitReplication()
    : scope_(dtensor::open_scope([](auto& scopes) { scopes.replicates_implicitly = true; })) {}
ImplicitReplication::~ImplicitReplication() = default;

StrictSharding::StrictSharding()
    : scope_(dtensor::open_scope([](auto& scopes) { scopes.is_strict = true; })) {}
StrictSharding::~StrictSharding() = default;

}  // namespace tessera
