#include "compiler/ir/operators.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace tessera::compiler {
namespace {

using NameSet = std::unordered_set<std::string>;

// Views that their schemas do not declare.
const NameSet kHiddenViews = {
    "_c10d_functional::wait_tensor", "aten::_unsafe_view", "aten::unsafe_split.Tensor",
    "aten::unsafe_split_with_sizes", "aten::unsafe_chunk",
};
const NameSet kSamePlaceViews = {"_c10d_functional::wait_tensor", "aten::alias", "aten::detach",
                                 "aten::lift_fresh"};
const NameSet kDisjointViews = {
    "aten::split.Tensor",
    "aten::split.sizes",
    "aten::split_with_sizes",
    "aten::chunk",
    "aten::tensor_split.sections",
    "aten::unbind.int",
    "aten::unsafe_split.Tensor",
    "aten::unsafe_split_with_sizes",
    "aten::unsafe_chunk",
    "aten::hsplit.int",
    "aten::vsplit.int",
    "aten::dsplit.int",
};
const NameSet kPointToPoint = {"_c10d_functional::isend", "_c10d_functional::irecv",
                               "_c10d_functional::batch_p2p_ops"};
// Launches that copy what they are given before they return.
const NameSet kCopyingLaunches = {"_c10d_functional::all_reduce",
                                  "_c10d_functional::all_reduce_coalesced",
                                  "_c10d_functional::broadcast"};

bool any_set(const c10::AliasInfo& alias) {
  if (!alias.beforeSets().empty()) return true;
  const auto& contained = alias.containedTypes();
  return std::any_of(contained.begin(), contained.end(), any_set);
}

bool any_write(const c10::AliasInfo* alias) {
  if (alias == nullptr) return false;
  if (alias->isWrite()) return true;
  const auto& contained = alias->containedTypes();
  return std::any_of(contained.begin(), contained.end(),
                     [](const auto& each) { return any_write(&each); });
}

bool shares(const c10::AliasInfo* alias) {
  return alias != nullptr && !any_write(alias) && any_set(*alias);
}

bool is_tensor_type(const c10::TypePtr& type) {
  if (const auto optional = type->cast<c10::OptionalType>())
    return is_tensor_type(optional->getElementType());
  if (const auto list = type->cast<c10::ListType>()) return is_tensor_type(list->getElementType());
  return type->kind() == c10::TypeKind::TensorType;
}

/// What the schema and the tags of one operator say, worked out once.
struct Facts {
  c10::OperatorHandle op;
  std::vector<bool> writes;
  std::vector<size_t> viewed;
  std::vector<size_t> own_returns;
  bool is_pointwise = false;
  bool is_random = false;
  bool has_returns = false;
  size_t dropout_p = SIZE_MAX;  // the argument of that name
};

Facts facts_of(const c10::OperatorHandle& op, const std::string& name) {
  const auto& schema = op.schema();
  Facts facts{op, {}, {}, own_returns(schema)};
  bool returns_view = kHiddenViews.count(name) != 0;
  for (const auto& result : schema.returns()) returns_view |= shares(result.alias_info());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    facts.writes.push_back(writes(schema, i));
    const bool declared = shares(argument.alias_info());
    const bool hidden = kHiddenViews.count(name) != 0 && is_tensor_type(argument.type());
    if (returns_view && (declared || hidden)) facts.viewed.push_back(i);
    if (argument.name() == "dropout_p") facts.dropout_p = i;
  }
  facts.is_pointwise = op.hasTag(at::Tag::pointwise);
  facts.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  facts.has_returns = !schema.returns().empty();
  return facts;
}

const Facts* find_facts(const std::string& name) {
  static thread_local std::unordered_map<std::string, Facts> known;
  const auto found = known.find(name);
  if (found != known.end()) return &found->second;
  const auto op = find_operator(name);
  if (!op) return nullptr;
  return &known.emplace(name, facts_of(*op, name)).first->second;
}

bool is_absent(const Argument& argument) {
  if (argument.kind == Argument::Kind::Value) return argument.values[0] == kNoValue;
  return argument.kind == Argument::Kind::Constant;
}

/// aten::native_batch_norm(input, weight, bias, running_mean, running_var, training, ...).
bool writes_statistics(const Node& node, size_t argument) {
  constexpr size_t kMean = 3, kVar = 4, kTraining = 5;
  if (node.op != "aten::native_batch_norm" || (argument != kMean && argument != kVar)) return false;
  const auto& training = node.arguments.at(kTraining).constant;
  return !training.isBool() || training.toBool();
}

}  // namespace

std::optional<c10::OperatorHandle> find_operator(const std::string& name) {
  if (name == kFused) return std::nullopt;
  const auto colons = name.find("::");
  if (colons == std::string::npos) return std::nullopt;
  const auto dot = name.find('.', colons);
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
}

std::string name_of(const c10::FunctionSchema& schema) {
  const auto& overload = schema.overload_name();
  return overload.empty() ? schema.name() : schema.name() + "." + overload;
}

bool writes(const c10::FunctionSchema& schema, size_t argument) {
  return any_write(schema.arguments().at(argument).alias_info());
}

namespace {

/// Fused optimizers write gradients only to divide them by a scale.
bool only_reads_gradients(const Node& node, size_t argument) {
  constexpr size_t kGradients = 1;
  if (argument != kGradients || !node.op.starts_with("aten::_fused_")) return false;
  const auto& declared = find_operator(node.op)->schema().arguments();
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (declared[i].name() == "grad_scale") return is_absent(node.arguments[i]);
  }
  return false;
}

}  // namespace

bool writes(const Node& node, size_t argument) {
  const Facts* facts = find_facts(node.op);
  if (facts == nullptr || argument >= facts->writes.size()) return false;
  if (only_reads_gradients(node, argument)) return false;
  if (!facts->writes[argument] && !writes_statistics(node, argument)) return false;
  return !is_absent(node.arguments.at(argument));
}

std::vector<size_t> own_returns(const c10::FunctionSchema& schema) {
  std::vector<size_t> own;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto& result = schema.returns()[i];
    if (is_tensor_type(result.type()) && !any_write(result.alias_info())) own.push_back(i);
  }
  return own;
}

bool is_view(const Node& node) {
  const Facts* facts = find_facts(node.op);
  return facts != nullptr && !facts->viewed.empty();
}

bool is_disjoint_view(const Node& node) { return kDisjointViews.count(node.op) != 0; }

bool is_same_place_view(const Node& node) { return kSamePlaceViews.count(node.op) != 0; }

std::vector<size_t> viewed_arguments(const Node& node) {
  const Facts* facts = find_facts(node.op);
  return facts == nullptr ? std::vector<size_t>{} : facts->viewed;
}

bool is_pointwise(const Node& node) {
  const Facts* facts = find_facts(node.op);
  return facts != nullptr && facts->is_pointwise;
}

bool is_random(const Node& node) {
  const Facts* facts = find_facts(node.op);
  if (facts == nullptr || !facts->is_random) return false;
  // Attention is tagged whether it drops anything or not.
  if (facts->dropout_p >= node.arguments.size()) return true;
  const auto& probability = node.arguments[facts->dropout_p].constant;
  return !probability.isDouble() || probability.toDouble() != 0;
}

bool is_collective(const Node& node) { return node.op.starts_with("_c10d_functional::"); }

bool is_wait(const Node& node) { return node.op == "_c10d_functional::wait_tensor"; }

bool is_gather(const Node& node) {
  return node.op == "_c10d_functional::all_gather_into_tensor" ||
         node.op == "_c10d_functional::all_gather_into_tensor_coalesced";
}

std::string group_of(const Node& node) {
  const auto op = find_operator(node.op);
  const auto& declared = op->schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].name() == "group_name") return node.arguments[i].constant.toStringRef();
  }
  return {};
}

bool is_launch(const Node& node) { return is_collective(node) && !is_wait(node); }

bool reads_until_waited(const Node& node) {
  return is_launch(node) && kCopyingLaunches.count(node.op) == 0;
}

bool consumes(const Node& node) {
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (writes(node, i)) return true;
  }
  return false;
}

bool must_stay(const Node& node) {
  if (kPointToPoint.count(node.op) != 0 || is_random(node)) return true;
  const Facts* facts = find_facts(node.op);
  return facts != nullptr && !facts->has_returns && !consumes(node);
}

bool has_effect(const Node& node) { return must_stay(node) || consumes(node); }

std::string in_place_form(const std::string& op) {
  const auto dot = op.find('.');
  const std::string name =
      op.substr(0, dot) + "_" + (dot == std::string::npos ? "" : op.substr(dot));
  const auto from = find_operator(op);
  const auto to = find_operator(name);
  if (!from || !to) return "";
  const auto& before = from->schema().arguments();
  const auto& after = to->schema().arguments();
  if (before.empty() || before.size() != after.size()) return "";
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i].name() != after[i].name() || *before[i].type() != *after[i].type()) return "";
    if (writes(to->schema(), i) != (i == 0) || writes(from->schema(), i)) return "";
  }
  const bool one_result = own_returns(from->schema()).size() == 1;
  return one_result && own_returns(to->schema()).empty() ? name : "";
}

}  // namespace tessera::compiler
