#include "dtensor/foreach.h"

#include "dtensor/call.h"
#include "dtensor/collectives.h"
#include "dtensor/part.h"
#include "dtensor/redistribute.h"
#include "dtensor/scopes.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace tessera::dtensor {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr std::string_view kForeach = "aten::_foreach_";
constexpr std::string_view kUnscale = "aten::_amp_foreach_non_finite_check_and_unscale_";
constexpr std::array<std::string_view, 4> kFused = {"aten::_fused_adam_", "aten::_fused_adamw_",
                                                    "aten::_fused_sgd_", "aten::_fused_adagrad_"};
/// Sums of parts give the sum: of lists scaled by numbers, and of lists added to lists.
constexpr std::array<std::string_view, 6> kScaled = {"aten::_foreach_mul_", "aten::_foreach_div_",
                                                     "aten::_foreach_neg_", "aten::_foreach_mul",
                                                     "aten::_foreach_div",  "aten::_foreach_neg"};
constexpr std::array<std::string_view, 4> kAdded = {"aten::_foreach_add_", "aten::_foreach_sub_",
                                                    "aten::_foreach_add", "aten::_foreach_sub"};

bool is_foreach(std::string_view name) {
  // Nearly every operator is told apart by these two letters.
  if (name.size() < 9 || name[6] != '_' || name[7] != 'f') return false;
  return name.starts_with(kForeach) ||
         std::find(kFused.begin(), kFused.end(), name) != kFused.end();
}

template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Numbers that sums can be multiplied or divided by one summand at a time; see scaled_rows.
bool is_scale(const c10::IValue& value, bool is_divisor) {
  const auto allows = [&](Number number) {
    return number != Number::NotFinite && !(is_divisor && number == Number::Zero);
  };
  if (value.isScalar()) return allows(number_in(value.toScalar()));
  if (value.isTensor()) return allows(number_in(value.toTensor()));
  if (!value.isList()) return true;
  const auto elements = value.toListRef();
  return std::all_of(elements.begin(), elements.end(),
                     [&](const auto& element) { return is_scale(element, is_divisor); });
}

/// `arguments`: behind the first list.
bool is_linear(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  const bool is_divided = schema.name().find("_div") != std::string::npos;
  for (const auto& argument : arguments) {
    if (!is_scale(argument, is_divided)) return false;
  }
  return schema.overload_name() == "List" ? contains(kAdded, schema.name())
                                          : contains(kScaled, schema.name());
}

/// Minima and the like are no sums.
bool is_sum(const Spec& spec) {
  return std::all_of(spec.placements.begin(), spec.placements.end(), [](const auto& placement) {
    return !placement.is_partial() || placement.reduce_op() == ReduceOp::SUM ||
           placement.reduce_op() == ReduceOp::AVG;
  });
}

bool has_sums(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return has_part(tensor) && part_of(tensor).spec->has_partial;
  });
}

at::Tensor local_as(const c10::FunctionSchema& schema, const at::Tensor& tensor,
                    const SpecPtr& to) {
  return part_of(redistributed(schema.name().c_str(), tensor, to)).local();
}

/// One call: where each element of the lists is placed.
class Elements {
 public:
  Elements(const c10::FunctionSchema& schema, const Tensors& first, bool writes_first,
           bool keeps_sums)
      : schema_(schema), first_(first) {
    for (const auto& tensor : first) {
      if (!has_part(tensor)) {
        targets_.emplace_back();
        continue;
      }
      if (writes_first) begin_write(schema.name().c_str(), tensor);
      auto spec = part_of(tensor).spec;
      if (spec->has_partial && !(keeps_sums && is_sum(*spec))) {
        TORCH_CHECK(
            !writes_first, schema.name(),
            ": an operation in place leaves its targets placed as they are, and there is no ",
            "way to do that for one placed ", c10::str(spec->placements),
            "; redistribute it first");
        spec = without_partial(spec);
      }
      targets_.push_back(std::move(spec));
    }
  }

  at::Tensor local(const at::Tensor& tensor, size_t i, bool is_written) const {
    if (!tensor.defined()) return tensor;
    if (has_part(tensor)) check_fresh(schema_.name().c_str(), tensor);
    const auto& target = targets_[i];
    if (!target) {
      TORCH_CHECK(!has_part(tensor), schema_.name(),
                  ": got a mix of distributed and plain tensors at place ", i, " of its lists");
      return tensor;
    }
    const bool is_number = tensor.numel() == 1 && first_[i].numel() != 1;
    if (!has_part(tensor)) {
      TORCH_CHECK(tensor.numel() == 1, schema_.name(),
                  ": got a mix of distributed and plain tensors at place ", i, " of its lists");
      return tensor;
    }
    const auto wanted = is_number ? replicated(*target) : target;
    TORCH_CHECK_VALUE(!is_written || part_of(tensor).spec->placements == wanted->placements,
                      schema_.name(), ": expected what is written at place ", i,
                      " of its lists to be placed ", c10::str(wanted->placements), ", got ",
                      c10::str(part_of(tensor).spec->placements),
                      "; redistribute it first (an optimizer's state lies as its parameter does)");
    if (is_number) return local_as(schema_, tensor, wanted);
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.sizes() == first_[i].sizes(), schema_.name(),
                                ": expected tensors of equal sizes at place ", i,
                                " of its lists, got ", first_[i].sizes(), " and ", tensor.sizes());
    return local_as(schema_, tensor, target);
  }

  at::Tensor wrapped(at::Tensor local, size_t i) const {
    if (!targets_[i]) return local;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !targets_[i]->is_member ||
            local.sizes() == c10::IntArrayRef(targets_[i]->local_sizes(first_[i].sizes())),
        schema_.name(), ": not supported on distributed tensors; call it on one tensor at a time");
    return wrap(std::move(local), targets_[i], first_[i].sizes(), first_[i].strides());
  }

 private:
  const c10::FunctionSchema& schema_;
  const Tensors& first_;
  std::vector<SpecPtr> targets_;
};

c10::IValue local_argument(const c10::FunctionSchema& schema, const Elements& elements,
                           const c10::IValue& value, size_t length, bool is_written) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (!has_part(tensor)) return value;
    return local_as(schema, tensor, replicated(*part_of(tensor).spec));
  }
  if (!value.isTensorList()) return value;
  auto tensors = value.toTensorVector();
  TORCH_CHECK_VALUE(tensors.empty() || tensors.size() == length, schema.name(),
                    ": expected lists of one length, got ", length, " and ", tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i)
    tensors[i] = elements.local(tensors[i], i, is_written);
  return tensors;
}

/// A norm is no sum: the operator on one tensor knows how to reduce it.
void run_norms(torch::jit::Stack& stack, size_t base, size_t arguments) {
  const auto tensors = stack[base].toTensorVector();
  const auto order = stack[base + 1].toScalar();
  const auto dtype = arguments > 2 ? stack[base + 2].toOptional<at::ScalarType>() : std::nullopt;
  Tensors norms;
  for (const auto& tensor : tensors)
    norms.push_back(at::linalg_vector_norm(tensor, order, at::OptionalIntArrayRef(), false, dtype));
  stack.resize(base);
  stack.emplace_back(std::move(norms));
}

/// Fused kernels walk through memory and take all tensors of a place to lie in it alike, which
/// parts cut from something larger do not. What is copied for that is copied back.
void call_fused(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (auto& value : stack) {
    if (!value.isTensorList()) continue;
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      if (tensor.is_contiguous()) continue;
      copies.emplace_back(tensor, tensor.contiguous());
      tensor = copies.back().second;
    }
    value = std::move(tensors);
  }
  op.callBoxed(stack);
  for (const auto& [original, copy] : copies) original.copy_(copy);
}

/// The largest of the ranks' numbers, over every mesh that has a part in one of the tensors.
void agree_on_largest(at::Tensor& number, const Tensors& tensors) {
  std::vector<DeviceMesh> done;
  for (const auto& tensor : tensors) {
    if (!has_part(tensor)) continue;
    const auto& spec = *part_of(tensor).spec;
    if (std::find(done.begin(), done.end(), spec.mesh) != done.end()) continue;
    done.push_back(spec.mesh);
    for (const auto& group : spec.groups) {
      if (group->getSize() > 1) number.copy_(reduce_all(number, ReduceOp::MAX, group).wait());
    }
  }
}

/// (gradients, found_inf, 1 / scale): what one rank finds in its parts counts for all, or they
/// would step apart.
void run_unscale(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const size_t base = stack.size() - op.schema().arguments().size();
  const auto gradients = stack[base].toTensorVector();
  const Elements elements(op.schema(), gradients, /*writes_first=*/true, /*keeps_sums=*/false);
  Tensors parts;
  for (size_t i = 0; i < gradients.size(); ++i)
    parts.push_back(elements.local(gradients[i], i, /*is_written=*/true));
  const auto number = [&](size_t index) {
    const auto& tensor = stack[base + index].toTensor();
    TORCH_CHECK_VALUE(!has_part(tensor) || part_of(tensor).spec->is_replicated, op.schema().name(),
                      ": expected found_inf and inv_scale to be numbers that all ranks hold, got ",
                      "a distributed one");
    return local_part(tensor);
  };
  auto found = number(1);
  torch::jit::Stack local{parts, found, number(2)};
  const LocalScope on_parts;
  op.callBoxed(local);
  agree_on_largest(found, gradients);
  stack.resize(base);
}

}  // namespace

bool run_foreach(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  if (schema.name() == kUnscale) {
    run_unscale(op, stack);
    return true;
  }
  if (!is_foreach(schema.name())) return false;
  const size_t arguments = schema.arguments().size();
  const size_t base = stack.size() - arguments;
  if (!stack[base].isTensorList()) return false;
  if (schema.name() == "aten::_foreach_norm") {
    run_norms(stack, base, arguments);
    return true;
  }
  const auto first = stack[base].toTensorVector();
  const auto* alias = schema.arguments()[0].alias_info();
  const auto others = c10::ArrayRef<c10::IValue>(stack).slice(base + 1, arguments - 1);
  const Elements elements(schema, first, alias != nullptr && alias->isWrite(),
                          has_sums(first) && is_linear(schema, others));
  torch::jit::Stack local;
  for (size_t i = 0; i < arguments; ++i) {
    const auto* own = schema.arguments()[i].alias_info();
    // The first list is the measure of all others. Gradients are written only to unscale them,
    // which nobody looks at afterwards.
    const bool is_written =
        i > 0 && own != nullptr && own->isWrite() && schema.arguments()[i].name() != "grads";
    local.push_back(local_argument(schema, elements, stack[base + i], first.size(), is_written));
  }
  {
    const LocalScope on_parts;
    if (contains(kFused, schema.name())) {
      call_fused(op, local);
    } else {
      op.callBoxed(local);
    }
  }
  stack.resize(base);
  for (auto& value : local) {
    auto results = value.toTensorVector();
    TORCH_CHECK_NOT_IMPLEMENTED(results.size() == first.size(), schema.name(),
                                ": not supported on distributed tensors");
    for (size_t i = 0; i < results.size(); ++i) results[i] = elements.wrapped(results[i], i);
    stack.emplace_back(std::move(results));
  }
  return true;
}

}  // namespace tessera::dtensor
