#include "dtensor/rules.h"

#include "dtensor/scopes.h"

#include <string>
#include <utility>

namespace tessera::dtensor {
namespace {

/// Filled by static initialisers, read-only afterwards.
RuleTable& rules() {
  static auto* const kRules = new RuleTable;
  return *kRules;
}

const Rule* find(const std::string& name) {
  const auto found = rules().find(name);
  return found == rules().end() ? nullptr : &found->second;
}

/// "aten::add_" -> "aten::add", if it writes its first argument.
std::string plain_name(const c10::FunctionSchema& schema) {
  const auto& name = schema.name();
  const bool is_dunder = name.ends_with("__");
  const auto& formals = schema.arguments();
  const bool writes =
      !formals.empty() && formals[0].alias_info() != nullptr && formals[0].alias_info()->isWrite();
  return writes && !is_dunder && name.ends_with("_") ? name.substr(0, name.size() - 1) : name;
}

/// Forms in place are not all tagged; their plain forms are.
bool is_pointwise(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::pointwise)) return true;
  const auto& schema = op.schema();
  const auto plain =
      c10::Dispatcher::singleton().findSchema({plain_name(schema), schema.overload_name()});
  return plain && plain->hasTag(at::Tag::pointwise);
}

}  // namespace

Registration::Registration(std::initializer_list<const char*> operators, Rule rule) {
  for (const auto* name : operators) rules().insert_or_assign(name, rule);
}

Registration::Registration(std::initializer_list<const char*> operators, Rows rows)
    : Registration(operators,
                   Rule{[rows = std::move(rows)](const Call&, int64_t) { return rows; }}) {}

const Rule* find_rule(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (const auto* scoped = scopes().rules) {
    if (const auto found = scoped->find(schema.name()); found != scoped->end())
      return &found->second;
  }
  if (const auto* rule = find(schema.name() + "." + schema.overload_name())) return rule;
  if (const auto* rule = find(schema.name())) return rule;
  if (const auto* rule = find(plain_name(schema))) return rule;
  if (!is_pointwise(op)) return nullptr;
  static const Rule kPointwise = pointwise_rule();
  return &kPointwise;
}

std::vector<std::string> registered_operators() {
  std::vector<std::string> names;
  for (const auto& [name, rule] : rules()) names.push_back(name);
  return names;
}

}  // namespace tessera::dtensor
