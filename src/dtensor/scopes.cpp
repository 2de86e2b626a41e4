#include "dtensor/scopes.h"

#include <tessera/dtensor/tools.h>

#include <c10/util/Exception.h>

#include <mutex>
#include <set>
#include <string>

namespace tessera {
namespace {

thread_local bool implicit_replication = false;
thread_local bool strict_sharding = false;

}  // namespace

ImplicitReplication::ImplicitReplication() : previous_(implicit_replication) {
  implicit_replication = true;
}
ImplicitReplication::~ImplicitReplication() { implicit_replication = previous_; }

StrictSharding::StrictSharding() : previous_(strict_sharding) { strict_sharding = true; }
StrictSharding::~StrictSharding() { strict_sharding = previous_; }

namespace dtensor {

bool replicates_implicitly() { return implicit_replication; }

void note_missing_rule(const c10::FunctionSchema& schema) {
  const auto& name = schema.operator_name();
  const auto text = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !strict_sharding, text,
      ": there is no sharding rule for this operator and StrictSharding is ",
      "on; redistribute its inputs to Replicate yourself, or add a rule (docs/adding.md)");
  static std::mutex mutex;
  static auto* const kNamed = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (kNamed->insert(text).second)
    TORCH_WARN(text, ": no sharding rule; its inputs are gathered on every rank");
}

}  // namespace dtensor
}  // namespace tessera
