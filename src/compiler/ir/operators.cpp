#include "compiler/ir/operators.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>

namespace tessera::compiler {
namespace {

// What neither schemas nor tags tell of operators.
enum Trait : uint32_t {
  kHiddenView = 1U << 0,         // a view that its schema does not declare
  kSamePlace = 1U << 1,          // the result is the argument itself, place by place
  kDisjoint = 1U << 2,           // no two of its views overlap
  kPointToPoint = 1U << 3,       // a message between two ranks
  kCopiesFirst = 1U << 4,        // a launch that copies what it is given before it returns
  kWait = 1U << 5,               // for a launch
  kGather = 1U << 6,             // a launch of parts of all ranks
  kSum = 1U << 7,                // an all-reduce
  kCopy = 1U << 8,               // the elements of an argument, elsewhere or as another dtype
  kFills = 1U << 9,              // writes all of its first argument, whatever that held
  kOtherMemory = 1U << 10,       // gives a tensor other memory
  kGivesSizes = 1U << 11,        // the numbers it returns are sizes of what it is given
  kIndexes = 1U << 12,           // as many elements as there are integers; of masks any number
  kCompares = 1U << 13,          // two tensors, on the host
  kAsksGradMode = 1U << 14,      // what it keeps for backward depends on that, below autograd, too
  kWritesStatistics = 1U << 15,  // running ones, in training, which its schema does not declare
  kDividesGradients = 1U << 16,  // writes its second list only to divide it by a scale
  kUneven = 1U << 17,            // ranks send tensors of different sizes to each other
};

/// One row per operator: with an overload, or without one for all of a name.
struct Row {
  std::string_view name;
  uint32_t traits;
};

constexpr Row kRows[] = {
    {"_c10d_functional::wait_tensor", kHiddenView | kSamePlace | kWait},
    {"_c10d_functional::isend", kPointToPoint},
    {"_c10d_functional::irecv", kPointToPoint},
    {"_c10d_functional::batch_p2p_ops", kPointToPoint},
    {"_c10d_functional::all_reduce", kSum | kCopiesFirst},
    {"_c10d_functional::all_reduce_", kSum},
    {"_c10d_functional::all_reduce_coalesced", kSum | kCopiesFirst},
    {"_c10d_functional::all_reduce_coalesced_", kSum},
    {"_c10d_functional::broadcast", kCopiesFirst},
    {"_c10d_functional::all_to_all_single", kUneven},
    {"_c10d_functional::all_gather_into_tensor", kGather},
    {"_c10d_functional::all_gather_into_tensor_coalesced", kGather},

    {"aten::alias", kSamePlace},
    {"aten::detach", kSamePlace},
    {"aten::lift_fresh", kSamePlace},
    {"aten::_unsafe_view", kHiddenView},
    {"aten::split.Tensor", kDisjoint},
    {"aten::split.sizes", kDisjoint},
    {"aten::split_with_sizes", kDisjoint},
    {"aten::chunk", kDisjoint},
    {"aten::tensor_split.sections", kDisjoint},
    {"aten::unbind.int", kDisjoint},
    {"aten::unsafe_split.Tensor", kHiddenView | kDisjoint},
    {"aten::unsafe_split_with_sizes", kHiddenView | kDisjoint},
    {"aten::unsafe_chunk", kHiddenView | kDisjoint},
    {"aten::hsplit.int", kDisjoint},
    {"aten::vsplit.int", kDisjoint},
    {"aten::dsplit.int", kDisjoint},

    {"aten::clone", kCopy},
    {"aten::_to_copy", kCopy},
    {"aten::copy", kCopy},
    {"aten::copy_", kCopy | kFills},
    {"aten::fill_", kFills},
    {"aten::zero_", kFills},
    {"aten::normal_", kFills},
    {"aten::uniform_", kFills},
    {"aten::bernoulli_", kFills},
    {"aten::random_", kFills},
    {"aten::exponential_", kFills},
    {"aten::geometric_", kFills},
    {"aten::cauchy_", kFills},
    {"aten::log_normal_", kFills},

    {"aten::resize_", kOtherMemory},
    {"aten::set_", kOtherMemory},
    {"aten::index", kIndexes},
    {"aten::equal", kCompares},
    {"aten::_scaled_dot_product_cudnn_attention", kGivesSizes},
    {"aten::_scaled_dot_product_flash_attention", kGivesSizes},
    {"aten::_scaled_dot_product_fused_attention_overrideable", kGivesSizes},
    {"aten::mkldnn_rnn_layer", kAsksGradMode},
    {"aten::native_batch_norm", kWritesStatistics},
    {"aten::_fused_adam_", kDividesGradients},
    {"aten::_fused_adamw_", kDividesGradients},
    {"aten::_fused_sgd_", kDividesGradients},
    {"aten::_fused_adagrad_", kDividesGradients},
};

/// Of "aten::add.Tensor", or of "aten::add" alone.
bool has(std::string_view op, Trait trait) {
  static const auto& rows = *[] {
    auto* by_name = new std::unordered_map<std::string_view, uint32_t>();
    for (const Row& row : kRows) by_name->emplace(row.name, row.traits);
    return by_name;
  }();
  const auto is_in = [&](std::string_view name) {
    const auto found = rows.find(name);
    return found != rows.end() && (found->second & trait) != 0;
  };
  const auto dot = op.find('.');
  return is_in(op) || (dot != std::string_view::npos && is_in(op.substr(0, dot)));
}

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
  const bool is_hidden = has(name, kHiddenView);
  bool returns_view = is_hidden;
  for (const auto& result : schema.returns()) returns_view |= shares(result.alias_info());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    facts.writes.push_back(writes(schema, i));
    const bool declared = shares(argument.alias_info());
    const bool hidden = is_hidden && is_tensor_type(argument.type());
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

/// (input, weight, bias, running_mean, running_var, training, ...).
bool writes_statistics(const Node& node, size_t argument) {
  constexpr size_t kMean = 3, kVar = 4, kTraining = 5;
  if ((argument != kMean && argument != kVar) || !has(node.op, kWritesStatistics)) return false;
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
  if (argument != kGradients || !has(node.op, kDividesGradients)) return false;
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

bool is_disjoint_view(const Node& node) { return has(node.op, kDisjoint); }

bool is_same_place_view(const Node& node) { return has(node.op, kSamePlace); }

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

bool is_wait(const Node& node) { return is_wait(node.op); }

bool is_wait(const std::string& op) { return op.starts_with("_c10d_") && has(op, kWait); }

bool is_gather(const Node& node) { return has(node.op, kGather); }
bool is_all_reduce(const Node& node) { return has(node.op, kSum); }
bool is_copy(const Node& node) { return has(node.op, kCopy); }
bool asks_grad_mode(const Node& node) { return has(node.op, kAsksGradMode); }
bool overwrites_first(const c10::FunctionSchema& schema) { return has(schema.name(), kFills); }
bool exchanges_memory(const c10::FunctionSchema& schema) {
  return has(schema.name(), kOtherMemory);
}
bool gives_sizes(const c10::FunctionSchema& schema) { return has(schema.name(), kGivesSizes); }
bool takes_indices(const c10::FunctionSchema& schema) { return has(schema.name(), kIndexes); }
bool compares_tensors(const c10::FunctionSchema& schema) { return has(schema.name(), kCompares); }

std::string group_of(const Node& node) {
  const auto op = find_operator(node.op);
  const auto& declared = op->schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].name() == "group_name") return node.arguments[i].constant.toStringRef();
  }
  return {};
}

bool is_launch(const Node& node) { return is_collective(node) && !is_wait(node); }

bool reads_until_waited(const Node& node) { return is_launch(node) && !has(node.op, kCopiesFirst); }

bool consumes(const Node& node) {
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (writes(node, i)) return true;
  }
  return false;
}

bool sends_unevenly(const Node& node) { return has(node.op, kUneven); }

bool must_stay(const Node& node) {
  if (has(node.op, kPointToPoint) || is_random(node)) return true;
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
