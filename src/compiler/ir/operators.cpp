#include "compiler/ir/operators.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>

namespace tessera::compiler {
namespace {

// What neither schemas nor tags tell of operators.
namespace trait {
enum Trait : uint64_t {
  HiddenView = 1U << 0,         // a view that its schema does not declare
  SamePlace = 1U << 1,          // the result is the argument itself, place by place
  Disjoint = 1U << 2,           // no two of its views overlap
  PointToPoint = 1U << 3,       // a message between two ranks
  CopiesFirst = 1U << 4,        // a launch that copies what it is given before it returns
  Wait = 1U << 5,               // for a launch
  Gather = 1U << 6,             // a launch of parts of all ranks
  Sum = 1U << 7,                // an all-reduce
  Copy = 1U << 8,               // the elements of an argument, elsewhere or as another dtype
  Fills = 1U << 9,              // writes all of its first argument, whatever that held
  OtherMemory = 1U << 10,       // gives a tensor other memory
  GivesSizes = 1U << 11,        // the numbers it returns are sizes of what it is given
  Indexes = 1U << 12,           // as many elements as there are integers; of masks any number
  Compares = 1U << 13,          // two tensors, on the host
  AsksGradMode = 1U << 14,      // what it keeps for backward depends on that, below autograd, too
  WritesStatistics = 1U << 15,  // running ones, in training, which its schema does not declare
  DividesGradients = 1U << 16,  // writes its second list only to divide it by a scale
  FromStart = 1U << 17,         // a view that begins where what it shows begins, if it is one
  Clones = 1U << 18,            // a copy of the argument's dtype
  Divides = 1U << 19,           // its first argument by its second
  Multiplies = 1U << 20,        // likewise
  Adds = 1U << 21,              // a multiple of its second argument to its first
  Subtracts = 1U << 22,         // likewise, from it
  Joins = 1U << 23,             // tensors to a longer one
  Broadcasts = 1U << 24,        // elements of its argument, some of them several times
  MadeOfSizes = 1U << 25,       // a constant of sizes that are given
  Alike = 1U << 26,             // elementwise, though not tagged so
  Uneven = 1U << 27,            // ranks send tensors of different sizes to each other
  ForAllocator = 1U << 28,      // says who uses memory, and computes nothing
  Product = 1U << 29,           // of matrices, the right one last
  OfRows = 1U << 30,            // a few passes over its arguments
  Scatter = 1U << 31,           // a reduce-scatter
  AddsRows = 1ULL << 32,        // to a product, a bias, with factors for both
  SizesAlone = 1ULL << 33,      // are what it reads of its tensors
  SizesOfFirst = 1ULL << 34,    // are what it takes of that, and elements of the next
  Spreads = 1ULL << 35,         // a launch that gives all ranks the same
};
}  // namespace trait

/// One row per operator: with an overload, or without one for all of a name.
struct OperatorRow {
  std::string_view name;
  uint64_t traits;
};

constexpr OperatorRow kOperatorRows[] = {
    {"_c10d_functional::wait_tensor", trait::HiddenView | trait::SamePlace | trait::Wait},
    {"_c10d_functional::isend", trait::PointToPoint},
    {"_c10d_functional::irecv", trait::PointToPoint},
    {"_c10d_functional::batch_p2p_ops", trait::PointToPoint},
    {"_c10d_functional::all_reduce", trait::Sum | trait::CopiesFirst | trait::Spreads},
    {"_c10d_functional::all_reduce_", trait::Sum | trait::Spreads},
    {"_c10d_functional::all_reduce_coalesced", trait::Sum | trait::CopiesFirst | trait::Spreads},
    {"_c10d_functional::all_reduce_coalesced_", trait::Sum | trait::Spreads},
    {"_c10d_functional::broadcast", trait::CopiesFirst | trait::Spreads},
    {"_c10d_functional::broadcast_", trait::Spreads},
    {"_c10d_functional::all_to_all_single", trait::Uneven},
    {"_c10d_functional::reduce_scatter_tensor", trait::Scatter},
    {"_c10d_functional::reduce_scatter_tensor_coalesced", trait::Scatter},
    {"_c10d_functional::all_gather_into_tensor", trait::Gather | trait::Spreads},
    {"_c10d_functional::all_gather_into_tensor_coalesced", trait::Gather | trait::Spreads},

    {"aten::alias", trait::SamePlace | trait::FromStart},
    {"aten::detach", trait::SamePlace | trait::FromStart},
    {"aten::lift_fresh", trait::SamePlace | trait::FromStart},
    {"aten::_unsafe_view", trait::HiddenView | trait::FromStart},
    {"aten::view", trait::FromStart},
    {"aten::reshape", trait::FromStart},
    {"aten::_reshape_alias", trait::FromStart},
    {"aten::expand", trait::FromStart | trait::Broadcasts},
    {"aten::permute", trait::FromStart},
    {"aten::transpose", trait::FromStart},
    {"aten::t", trait::FromStart},
    {"aten::squeeze", trait::FromStart},
    {"aten::contiguous", trait::FromStart},
    {"aten::flatten", trait::FromStart},
    {"aten::split.Tensor", trait::Disjoint},
    {"aten::split.sizes", trait::Disjoint},
    {"aten::split_with_sizes", trait::Disjoint},
    {"aten::chunk", trait::Disjoint},
    {"aten::tensor_split.sections", trait::Disjoint},
    {"aten::unbind.int", trait::Disjoint},
    {"aten::unsafe_split.Tensor", trait::HiddenView | trait::Disjoint},
    {"aten::unsafe_split_with_sizes", trait::HiddenView | trait::Disjoint},
    {"aten::unsafe_chunk", trait::HiddenView | trait::Disjoint},
    {"aten::hsplit.int", trait::Disjoint},
    {"aten::vsplit.int", trait::Disjoint},
    {"aten::dsplit.int", trait::Disjoint},

    {"aten::clone", trait::Copy | trait::Clones | trait::Alike},
    {"aten::_to_copy", trait::Copy | trait::Alike},
    {"aten::copy", trait::Copy | trait::SizesOfFirst},
    {"aten::copy_", trait::Copy | trait::Fills | trait::Alike | trait::SizesOfFirst},
    {"aten::fill_", trait::Fills},
    {"aten::zero_", trait::Fills | trait::SizesAlone},
    {"aten::normal_", trait::Fills},
    {"aten::uniform_", trait::Fills},
    {"aten::bernoulli_", trait::Fills},
    {"aten::random_", trait::Fills},
    {"aten::exponential_", trait::Fills},
    {"aten::geometric_", trait::Fills},
    {"aten::cauchy_", trait::Fills},
    {"aten::log_normal_", trait::Fills},

    {"aten::div.Scalar", trait::Divides},
    {"aten::div.Tensor", trait::Divides},
    {"aten::div_.Scalar", trait::Divides},
    {"aten::div_.Tensor", trait::Divides},
    {"aten::mul", trait::Multiplies},
    {"aten::add", trait::Adds},
    {"aten::sub", trait::Subtracts},
    {"aten::cat", trait::Joins},
    {"aten::repeat", trait::Broadcasts},
    {"aten::zeros", trait::MadeOfSizes},
    {"aten::ones", trait::MadeOfSizes},
    {"aten::full", trait::MadeOfSizes},
    {"aten::zeros_like", trait::Alike | trait::SizesAlone},
    {"aten::ones_like", trait::Alike | trait::SizesAlone},
    {"aten::full_like", trait::Alike | trait::SizesAlone},
    {"aten::empty_like", trait::Alike | trait::SizesAlone},
    {"aten::new_zeros", trait::SizesAlone},
    {"aten::new_ones", trait::SizesAlone},
    {"aten::new_full", trait::SizesAlone},
    {"aten::new_empty", trait::SizesAlone},
    {"aten::zero", trait::SizesAlone},
    {"aten::new_empty_strided", trait::SizesAlone},
    {"aten::fill.Scalar", trait::SizesAlone},
    {"aten::fill_.Scalar", trait::SizesAlone},
    {"aten::fill.Tensor", trait::SizesOfFirst},
    {"aten::fill_.Tensor", trait::SizesOfFirst},
    {"aten::lerp_.Scalar", trait::Alike},

    {"aten::mm", trait::Product},
    {"aten::addmm", trait::Product | trait::AddsRows},
    {"aten::bmm", trait::Product},
    {"aten::baddbmm", trait::Product},
    {"aten::native_layer_norm", trait::OfRows},
    {"aten::_fused_rms_norm", trait::OfRows},
    {"aten::_softmax", trait::OfRows},
    {"aten::_log_softmax", trait::OfRows},
    {"aten::sum", trait::OfRows},
    {"aten::mean", trait::OfRows},
    {"aten::amax", trait::OfRows},
    {"aten::embedding", trait::OfRows},

    {"aten::resize_", trait::OtherMemory},
    {"aten::set_", trait::OtherMemory},
    {"aten::index", trait::Indexes},
    {"aten::equal", trait::Compares},
    {"aten::_scaled_dot_product_cudnn_attention", trait::GivesSizes},
    {"aten::_scaled_dot_product_flash_attention", trait::GivesSizes},
    {"aten::_scaled_dot_product_fused_attention_overrideable", trait::GivesSizes},
    {"aten::mkldnn_rnn_layer", trait::AsksGradMode},
    {"aten::record_stream", trait::ForAllocator},
    {"aten::native_batch_norm", trait::WritesStatistics},
    {"aten::_fused_adam_", trait::DividesGradients},
    {"aten::_fused_adamw_", trait::DividesGradients},
    {"aten::_fused_sgd_", trait::DividesGradients},
    {"aten::_fused_adagrad_", trait::DividesGradients},
};

/// Of "aten::add.Tensor", or of "aten::add" alone.
bool has(std::string_view op, trait::Trait wanted) {
  static const auto& rows = *[] {
    auto* by_name = new std::unordered_map<std::string_view, uint64_t>();
    for (const OperatorRow& row : kOperatorRows) by_name->emplace(row.name, row.traits);
    return by_name;
  }();
  const auto is_in = [&](std::string_view name) {
    const auto found = rows.find(name);
    return found != rows.end() && (found->second & wanted) != 0;
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
  const bool is_hidden = has(name, trait::HiddenView);
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
  if ((argument != kMean && argument != kVar) || !has(node.op, trait::WritesStatistics))
    return false;
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
  if (argument != kGradients || !has(node.op, trait::DividesGradients)) return false;
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

bool is_disjoint_view(const Node& node) { return has(node.op, trait::Disjoint); }

bool is_same_place_view(const Node& node) { return has(node.op, trait::SamePlace); }

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

bool is_wait(const std::string& op) { return op.starts_with("_c10d_") && has(op, trait::Wait); }

bool is_gather(const Node& node) { return has(node.op, trait::Gather); }
bool is_all_reduce(const Node& node) { return has(node.op, trait::Sum); }
bool is_reduce_scatter(const Node& node) { return has(node.op, trait::Scatter); }
bool is_copy(const Node& node) { return has(node.op, trait::Copy); }
bool is_clone(const Node& node) { return has(node.op, trait::Clones); }
bool views_from_start(const Node& node) { return has(node.op, trait::FromStart); }
bool reads_sizes_alone(const Node& node) { return has(node.op, trait::SizesAlone); }
bool takes_sizes_of_first(const Node& node) { return has(node.op, trait::SizesOfFirst); }
bool gives_all_ranks_the_same(const Node& node) { return has(node.op, trait::Spreads); }
bool is_division(const Node& node) { return has(node.op, trait::Divides); }
bool is_concatenation(const Node& node) { return has(node.op, trait::Joins); }
bool is_broadcast(const Node& node) { return has(node.op, trait::Broadcasts); }
bool is_constant_of_sizes(const Node& node) { return has(node.op, trait::MadeOfSizes); }
bool is_over_lists(const Node& node) {
  if (node.op.starts_with("aten::_foreach_")) return true;
  // Of which _fused_rms_norm is none.
  return node.op.starts_with("aten::_fused_") &&
         std::ranges::any_of(node.arguments, [](const Argument& argument) {
           return argument.kind == Argument::Kind::List;
         });
}
bool is_fused_update(const Node& node) {
  return node.op.starts_with("aten::_fused_") && consumes(node);
}
bool is_matrix_product(const Node& node) { return node.op == "aten::mm"; }
std::optional<size_t> factors_of(const Node& node) {
  if (is_matrix_product(node)) return 0;
  if (!has(node.op, trait::AddsRows)) return std::nullopt;
  const auto is_one = [&](size_t argument) {
    const auto& factor = node.arguments.at(argument).constant;
    return factor.isScalar() && factor.toScalar().toDouble() == 1;
  };
  constexpr size_t kBeta = 3, kAlpha = 4;
  return is_one(kBeta) && is_one(kAlpha) ? std::optional<size_t>(1) : std::nullopt;
}
bool multiplies_matrices(const Node& node) { return has(node.op, trait::Product); }
bool computes_rows(const Node& node) { return has(node.op, trait::OfRows); }
bool is_elementwise(const Node& node) {
  return is_pointwise(node) || has(node.op, trait::Alike) || is_over_lists(node);
}
std::optional<Arithmetic> arithmetic_of(const Node& node) {
  if (consumes(node)) return std::nullopt;
  if (has(node.op, trait::Multiplies) || has(node.op, trait::Divides)) return Arithmetic::Scales;
  if (has(node.op, trait::Adds)) return Arithmetic::Adds;
  if (has(node.op, trait::Subtracts)) return Arithmetic::Subtracts;
  return std::nullopt;
}
bool is_for_allocator(const c10::FunctionSchema& schema) {
  return has(name_of(schema), trait::ForAllocator);
}

bool asks_grad_mode(const Node& node) { return has(node.op, trait::AsksGradMode); }
bool overwrites(const c10::FunctionSchema& schema, size_t argument) {
  const bool is_out = schema.arguments()[argument].kwarg_only();
  return is_out || (argument == 0 && has(schema.name(), trait::Fills));
}
bool exchanges_memory(const c10::FunctionSchema& schema) {
  return has(schema.name(), trait::OtherMemory);
}
bool gives_sizes(const c10::FunctionSchema& schema) {
  return has(schema.name(), trait::GivesSizes);
}
bool takes_indices(const c10::FunctionSchema& schema) { return has(schema.name(), trait::Indexes); }
bool compares_tensors(const c10::FunctionSchema& schema) {
  return has(schema.name(), trait::Compares);
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
  return is_launch(node) && !has(node.op, trait::CopiesFirst);
}

bool consumes(const Node& node) {
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (writes(node, i)) return true;
  }
  return false;
}

bool sends_unevenly(const Node& node) { return has(node.op, trait::Uneven); }

bool must_stay(const Node& node) {
  if (has(node.op, trait::PointToPoint) || is_random(node)) return true;
  const Facts* facts = find_facts(node.op);
  return facts != nullptr && !facts->has_returns && !consumes(node);
}

bool has_effect(const Node& node) { return must_stay(node) || consumes(node); }

c10::IValue constant_as_declared(const c10::IValue& constant, const c10::Argument& declared) {
  const auto& type = *declared.type();
  const bool is_required = type.kind() == c10::TypeKind::TensorType;
  const bool is_optional = type.kind() == c10::TypeKind::OptionalType &&
                           type.containedType(0)->kind() == c10::TypeKind::TensorType;
  if (constant.isScalar() && (is_required || is_optional)) {
    auto tensor = at::scalar_to_tensor(constant.toScalar());
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }
  // Attention on a GPU is given no bias so.
  return constant.isNone() && is_required ? c10::IValue(at::Tensor()) : constant;
}

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
