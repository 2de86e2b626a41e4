#include "dtensor/registration.h"

#include "base/dispatcher.h"
#include "base/torch_versions.h"
#include "dtensor/autograd.h"
#include "dtensor/dispatch.h"
#include "dtensor/part.h"
#include "dtensor/plan.h"
#include "dtensor/scopes.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <span>
#include <string>

namespace tessera::dtensor {

/// Kernel above autograd, of operators by which a loss and a penalty meet: makes the penalty plain,
/// or calls autograd's own. See Note [losses stay plain].
void keep_loss_plain(const c10::OperatorHandle& op, torch::jit::Stack* stack);

namespace {

// Note [losses stay plain]
// A plain tensor of one element beside distributed ones counts as a number that all ranks hold. A
// loss does not: in data parallel training each rank has its own, and the gradient that goes back
// through it must be plain. So where one meets a distributed tensor of one element, a penalty on
// parameters say, that one becomes plain, and so does the sum. What the ranks' losses are averaged
// to depends on the penalty by the average of the ranks' gradients; where all ranks hold the same
// loss, as in tensor parallel training, the average is what each has.

using torch::autograd::variable_list;

class PlainLossBackward final : public torch::autograd::Node {
 public:
  explicit PlainLossBackward(const at::Tensor& forward)
      : whole_(replicated(*part_of(forward).spec)),
        averaged_(
            make_spec(whole_->mesh, Placements(whole_->placements.size(), Partial(ReduceOp::AVG)))),
        sizes_(forward.sizes().vec()),
        strides_(forward.strides().vec()) {}
  std::string name() const override { return "TesseraPlainLossBackward"; }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {redistribute(from_local(gradients[0], averaged_, sizes_, strides_, whole_), whole_)};
  }

 private:
  const SpecPtr whole_;
  const SpecPtr averaged_;
  const Sizes sizes_;
  const Sizes strides_;
};

at::Tensor made_plain(const at::Tensor& tensor) {
  const auto whole = redistribute(tensor.detach(), replicated(*part_of(tensor).spec));
  auto plain = part_of(whole).local().clone();
  if (!c10::GradMode::is_enabled() || !tensor.requires_grad()) return plain;
  auto node = make_node<PlainLossBackward>(tensor);
  node->set_next_edges(torch::autograd::collect_next_edges(tensor));
  torch::autograd::set_history(plain, node);
  return plain;
}

bool is_loss(const at::Tensor& tensor) {
  return tensor.defined() && !has_part(tensor) && tensor.numel() == 1 && tensor.requires_grad();
}

bool can_be_plain(const at::Tensor& tensor) {
  return !has_part(tensor) || (tensor.numel() == 1 && part_of(tensor).spec->is_member);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace

void keep_loss_plain(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::span<c10::IValue> arguments(stack->data() + stack->size() - count, count);
  bool has_loss = false;
  bool fits = true;
  for (size_t i = 0; i < count; ++i) {
    if (!arguments[i].isTensor()) continue;
    const auto& tensor = arguments[i].toTensor();
    has_loss = has_loss || is_loss(tensor);
    fits = fits && can_be_plain(tensor) && !(has_part(tensor) && is_written(schema.arguments()[i]));
  }
  if (!has_loss || !fits) return op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, *stack);
  for (auto& value : arguments) {
    if (value.isTensor() && has_part(value.toTensor())) value = made_plain(value.toTensor());
  }
  op.callBoxed(*stack);
}

/// Kernel above autograd, of operators whose derivative looks for the elements that equal the
/// result: reduces Partial inputs, then calls autograd's own. See Note [reduced once].
void reduce_first(const c10::OperatorHandle& op, torch::jit::Stack* stack);

namespace {

// Note [reduced once]
// The derivatives of maxima, medians and infinite norms share the gradient among the elements that
// equal the result. If autograd saved an input that is Partial, backward would reduce it a second
// time, perhaps in another order and so rounded otherwise: no element would be equal, and the
// gradient divided by their count, 0. So what such an operator is to be differentiated for is
// reduced before autograd sees it, to where the call wants it anyhow.

/// Sums depend on their order; minima, maxima and bits do not.
bool is_rounded(const Placement& placement) {
  if (!placement.is_partial()) return false;
  const auto op = placement.reduce_op();
  return op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PRODUCT;
}

bool is_rounded(const at::Tensor& tensor) {
  if (!has_part(tensor) || !part_of(tensor).spec->has_partial) return false;
  const auto& placements = part_of(tensor).spec->placements;
  return std::any_of(placements.begin(), placements.end(),
                     [](const Placement& placement) { return is_rounded(placement); });
}

template <class Test>
bool any_tensor(std::span<const c10::IValue> arguments, const Test& test) {
  return std::any_of(arguments.begin(), arguments.end(), [&](const c10::IValue& value) {
    if (value.isTensor()) return test(value.toTensor());
    if (!value.isTensorList()) return false;
    const auto tensors = value.toTensorVector();
    return std::any_of(tensors.begin(), tensors.end(), test);
  });
}

/// `wanted`: by tensor argument; empty: replicated.
void reduce(c10::IValue& value, const std::optional<Placements>& wanted) {
  const auto reduced = [&](const at::Tensor& tensor) {
    if (!is_rounded(tensor)) return tensor;
    const auto& spec = part_of(tensor).spec;
    return redistribute(tensor, wanted ? make_spec(spec->mesh, *wanted) : without_partial(spec));
  };
  if (value.isTensor()) {
    value = reduced(value.toTensor());
  } else {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = reduced(tensor);
    value = std::move(tensors);
  }
}

void reduce_inputs(const c10::OperatorHandle& op, std::span<c10::IValue> arguments) {
  const Call call(op.schema(), {arguments.begin(), arguments.end()});
  // Lists of tensors that have nothing to do with each other are not planned together.
  const bool is_list = std::any_of(call.inputs().begin(), call.inputs().end(),
                                   [](const auto& input) { return input.is_list; });
  std::optional<CallPlan> plan;
  if (!is_list) plan = make_plan(op, call);
  for (size_t i = 0; i < call.input_count(); ++i) {
    const auto& input = call.inputs()[i];
    if (!call.has(i)) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !input.is_written || !is_rounded(arguments[input.index].toTensor()), op.schema().name(),
        ": expected a target placed Shard or Replicate where the derivative is wanted, got ",
        c10::str(call.operand(i).spec->placements),
        "; redistribute it first, or use the form that returns a new tensor");
    reduce(arguments[input.index], plan ? std::optional(plan->choice.inputs[i]) : std::nullopt);
  }
}

}  // namespace

void reduce_first(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const std::span<c10::IValue> arguments(stack->data() + stack->size() - count, count);
  const auto needs_gradient = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  if (c10::GradMode::is_enabled() &&
      any_tensor(arguments, [](const at::Tensor& tensor) { return is_rounded(tensor); }) &&
      any_tensor(arguments, needs_gradient))
    reduce_inputs(op, arguments);
  op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, *stack);
}

/// Kernel above autograd, of operators that libtorch puts together from others in ways distributed
/// tensors do not take: gathers the inputs, with autograd, and calls the operator on whole tensors.
/// Their results are replicated.
void gather_first(const c10::OperatorHandle& op, torch::jit::Stack* stack);

namespace {

bool needs_gradient(std::span<const c10::IValue> arguments) {
  return c10::GradMode::is_enabled() &&
         std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& value) {
           return value.isTensor() && value.toTensor().requires_grad();
         });
}

}  // namespace

void gather_first(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t base = stack->size() - schema.arguments().size();
  const std::span<c10::IValue> arguments(stack->data() + base, schema.arguments().size());
  // Without a gradient the kernel below gathers by itself.
  if (!needs_gradient(arguments)) return op.callBoxedForDispatchKey(kKey, *stack);
  note_missing_rule(schema);
  SpecPtr whole;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!scopes().replicates_implicitly) check_plain(schema, arguments, i);
    if (!arguments[i].isTensor() || !has_part(arguments[i].toTensor())) continue;
    const auto& spec = *part_of(arguments[i].toTensor()).spec;
    if (whole) check_one_mesh(schema.name(), *whole, spec);
    whole = replicated(spec);
  }
  for (auto& value : arguments) {
    if (!value.isTensor() || !has_part(value.toTensor())) continue;
    check_fresh(schema.name().c_str(), value.toTensor());
    value = to_local(redistribute(value.toTensor(), whole), whole);
  }
  torch::jit::Stack local(stack->begin() + static_cast<long>(base), stack->end());
  stack->resize(base);
  call_boxed(op, local);
  for (const auto& value : local) {
    const auto result = value.toTensor();
    stack->emplace_back(from_local(result, whole, result.sizes(), result.strides(), whole));
  }
}

namespace {

using c10::DispatchKey;

/// Composite operators, of backward formulas most, that would write into plain tensors of their
/// making.
constexpr const char* kTakenWhole[] = {"affine_grid_generator_backward",
                                       "value_selecting_reduction_backward", "cummaxmin_backward",
                                       "trace_backward", "one_hot"};

/// Operators, with their overloads, whose derivative looks for the elements that equal the result.
/// See Note [reduced once].
constexpr const char* kReducedFirst[] = {"amax",
                                         "amin",
                                         "aminmax",
                                         "max",
                                         "min",
                                         "median",
                                         "nanmedian",
                                         "linalg_vector_norm",
                                         "norm.Scalar",
                                         "norm.ScalarOpt_dtype",
                                         "norm.ScalarOpt_dim",
                                         "norm.ScalarOpt_dim_dtype",
                                         "dist",
                                         "_cdist_forward",
                                         "_pdist_forward",
                                         "scatter_reduce.two",
                                         "scatter_reduce_.two",
                                         "index_reduce",
                                         "index_reduce_",
                                         "segment_reduce",
                                         "_foreach_norm.Scalar",
                                         "_foreach_max"};

/// Put together, with their derivatives, from operators in place and from plain tensors.
constexpr const char* kGatheredFirst[] = {"quantile", "quantile.scalar", "nanquantile",
                                          "nanquantile.scalar"};

/// See Note [losses stay plain].
constexpr const char* kOfLosses[] = {"add.Tensor",  "sub.Tensor",  "mul.Tensor",  "div.Tensor",
                                     "add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor"};

auto kernel() { return torch::CppFunction::makeFromBoxedFunction<&dispatch>(); }

/// What stays registered until the process ends.
struct Libraries {
  torch::Library fallback{torch::Library::IMPL, "_", kKey, __FILE__, __LINE__};
  torch::Library aten{torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__};
  torch::Library autograd{torch::Library::IMPL, "aten", DispatchKey::AutogradPrivateUse3, __FILE__,
                          __LINE__};
  torch::Library autograd_fallback{torch::Library::IMPL, "_", DispatchKey::AutogradPrivateUse3,
                                   __FILE__, __LINE__};
};

/// An operator that its parts would otherwise run for. Those parts knew its derivative; where
/// nobody else does, asking for it is an error.
void take_whole(Libraries& libraries, const std::string& name) {
  libraries.aten.impl(name.c_str(), kernel());
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::" + name, ""});
  if (!op || op->hasKernelForDispatchKey(DispatchKey::Autograd)) return;
  libraries.autograd.impl(name.c_str(), torch::autograd::autogradNotImplementedFallback());
}

template <auto* Kernel>
void take_above_autograd(Libraries& libraries, const std::string& name) {
  const auto dot = name.find('.');
  const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto op =
      c10::Dispatcher::singleton().findSchema({"aten::" + name.substr(0, dot), overload});
  if (!op || !op->hasKernelForDispatchKey(DispatchKey::Autograd)) return;  // of another libtorch
  libraries.autograd.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<Kernel>());
}

void take_key() {
  auto& dispatcher = c10::Dispatcher::singleton();
  TORCH_CHECK(!dispatcher.hasBackendFallbackForDispatchKey(kKey),
              "tessera: the dispatch key PrivateUse3, which distributed tensors need, is taken by ",
              "something else in this process");
  auto* libraries = new Libraries;
  libraries->fallback.fallback(kernel());
  // Operators without a derivative, users' own among them, would not get past this key.
  libraries->autograd_fallback.fallback(torch::autograd::autogradNotImplementedFallback());
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !bypasses_fallback(*op)) continue;
    const auto full =
        name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    libraries->aten.impl(full.c_str(), kernel());
  }
  for (const auto* name : kTakenWhole) take_whole(*libraries, name);
  for (const auto* name : kGatheredFirst) {
    libraries->aten.impl(name, kernel());
    libraries->autograd.impl(name, torch::CppFunction::makeFromBoxedFunction<&gather_first>());
  }
  for (const auto* name : kReducedFirst) take_above_autograd<&reduce_first>(*libraries, name);
  for (const auto* name : kOfLosses) take_above_autograd<&keep_loss_plain>(*libraries, name);
}

}  // namespace

void ensure_registered() {
  static std::once_flag once;
  std::call_once(once, take_key);
}

}  // namespace tessera::dtensor
