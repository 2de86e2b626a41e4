#include "dtensor/dispatch.h"

#include "base/dispatcher.h"
#include "base/storage.h"
#include "dtensor/autograd.h"
#include "dtensor/call.h"
#include "dtensor/debug.h"
#include "dtensor/foreach.h"
#include "dtensor/part.h"
#include "dtensor/plan.h"
#include "dtensor/random.h"
#include "dtensor/redistribute.h"
#include "dtensor/scopes.h"

#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <memory>
#include <span>
#include <unordered_map>

namespace tessera::dtensor {
namespace {

constexpr size_t kRememberedPlans = 20000;  // per thread; then all are worked out again

struct KeyHash {
  using is_transparent = void;
  size_t operator()(const CallKey& key) const { return key.hash(); }
  size_t operator()(const CallKey* key) const { return key->hash(); }
};
struct KeyEqual {
  using is_transparent = void;
  bool operator()(const CallKey& left, const CallKey& right) const {
    return left.words() == right.words();
  }
  bool operator()(const CallKey* left, const CallKey& right) const {
    return left->words() == right.words();
  }
  bool operator()(const CallKey& left, const CallKey* right) const {
    return left.words() == right->words();
  }
};
/// Of this thread, so that ranks that are threads need no lock and keep apart.
using Plans = std::unordered_map<CallKey, std::shared_ptr<const CallPlan>, KeyHash, KeyEqual>;

/// Whether a derivative formula of libtorch runs, all of which are traceable: plain tensors they
/// make (zeros, masks) are the same on every rank.
bool in_derivative_formula() {
  const auto node = torch::autograd::get_current_node();
  return node && node->is_traceable();
}

/// What a mix of plain and distributed tensors hints at.
std::string hint_of_mix(const c10::FunctionSchema& schema, std::span<const c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (!value.isTensor() || !has_part(value.toTensor())) continue;
    const auto& owner = part_of(value.toTensor()).owner;
    if (!owner) continue;
    // As torch::nn::init's that make a whole matrix do.
    if (schema.name() == "aten::copy_" && &value == arguments.data())
      return c10::str("; the target is ", owner->name,
                      ", which is sharded: give it whole values before it is sharded, inside a "
                      "SummonFullParams scope, or with load_state_dict(module, values); so also "
                      "torch::nn::init::orthogonal_ and others that compute the whole");
    return c10::str("; the distributed one is ", owner->name,
                    ", which is sharded outside of that module's forward: call the module itself, "
                    "not its parts nor a reference to its base class, and name further entry "
                    "points with TESSERA_MODULE_METHOD");
  }
  const bool writes_plain =
      schema.name().ends_with('_') && arguments[0].isTensor() && !has_part(arguments[0].toTensor());
  return writes_plain ? "; an optimizer that has made its states before parameters were sharded "
                        "can't go on with them: make it afterwards"
                      : "";
}

c10::IValue local_value(const c10::FunctionSchema& schema, const c10::IValue& value) {
  const auto local = [&](const at::Tensor& tensor) {
    if (!has_part(tensor)) return tensor;
    check_fresh(schema.name().c_str(), tensor);
    if (tensor.requires_grad()) guard_gradient(tensor);
    return part_of(tensor).local();
  };
  if (value.isTensor()) return local(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const auto& each : value.toListRef()) tensors.push_back(local(each.toTensor()));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      tensors.push_back(tensor ? std::optional(local(*tensor)) : std::nullopt);
    return tensors;
  }
  return value;
}

void replace_tensor(c10::IValue& value, size_t position, at::Tensor tensor) {
  if (value.isTensor()) {
    value = std::move(tensor);
  } else if (value.isTensorList()) {
    auto list = value.toTensorList();
    list.set(position, std::move(tensor));
  } else {
    auto list = value.toOptionalTensorList();
    list.set(position, std::optional(std::move(tensor)));
  }
}

const at::Tensor& tensor_at(const c10::IValue& value, size_t position) {
  return value.isTensor() ? value.toTensor() : value.toListRef()[position].toTensor();
}

/// Runs a plan for one call. The stack holds the global arguments, then the results.
class Run {
 public:
  Run(const c10::OperatorHandle& op, const CallPlan& plan, torch::jit::Stack& stack)
      : op_(op),
        plan_(plan),
        stack_(stack),
        arguments_(op.schema().arguments().size()),
        base_(stack.size() - arguments_) {}

  void operator()() {
    check_written();
    auto local = local_arguments();
    if (plan_.mesh->is_member) {
      std::vector<at::Tensor> written;
      for (const auto& way : plan_.returns) written.push_back(local[way.argument].toTensor());
      call(local);
      for (size_t i = 0; i < written.size(); ++i) bring_back(plan_.returns[i], written[i]);
    } else {
      local = outside_results();
    }
    for (size_t i = 0; i < plan_.outputs.size(); ++i) wrap_output(plan_.outputs[i], local[i]);
    stack_.resize(base_);
    for (auto& value : local) stack_.push_back(std::move(value));
  }

 private:
  void check_written() const {
    for (const auto& output : plan_.outputs) {
      if (!output.same_as) continue;
      const auto& value = stack_[base_ + *output.same_as];
      if (!value.isTensor() || !has_part(value.toTensor())) continue;
      begin_write(op_.schema().name().c_str(), value.toTensor());
    }
  }

  torch::jit::Stack local_arguments() const {
    torch::jit::Stack local;
    local.reserve(arguments_ + 1);
    for (size_t i = 0; i < arguments_; ++i)
      local.push_back(local_value(op_.schema(), stack_[base_ + i]));
    if (!plan_.mesh->is_member) return local;
    for (const auto& move : plan_.moves) {
      const auto& tensor = tensor_at(stack_[base_ + move.argument], move.position);
      // A plain tensor counts as replicated.
      const auto from = has_part(tensor) ? part_of(tensor).spec : replicated(*plan_.mesh);
      auto& value = local[move.argument];
      replace_tensor(value, move.position,
                     run_path(move.path, tensor_at(value, move.position), *from, tensor.sizes()));
    }
    for (const auto& [index, value] : plan_.replaced) local[index] = value;
    if (plan_.rule != nullptr && plan_.rule->reads_layout) match_layout(local[0]);
    // out= gets memory for the result as it comes; see put().
    for (const auto& destination : plan_.destinations)
      local[destination.index] = at::empty({0}, local[destination.index].toTensor().options());
    return local;
  }

  void match_layout(c10::IValue& value) const {
    const auto& part = value.toTensor();
    if (stack_[base_].toTensor().is_contiguous())
      value = part.contiguous();
    else if (part.is_contiguous())
      value = part.mT().contiguous().mT();
  }

  void bring_back(const CallPlan::Return& way, const at::Tensor& written) const {
    const auto& target = stack_[base_ + way.argument].toTensor();
    part_of(target).local().copy_(run_path(way.path, written, *way.from, target.sizes()));
  }

  /// Writes a result into an out= argument, placed as that one is.
  void put(const CallPlan::Output& output, at::Tensor local, const at::Tensor& destination) const {
    const auto result = wrap_tensor(output, std::move(local), 0);
    if (!has_part(destination)) return put_whole(result, destination);
    auto& target = part_of(destination);
    const auto placed = redistributed(op_.schema().name().c_str(), result, target.spec);
    if (destination.sizes() == result.sizes()) {
      target.local().copy_(part_of(placed).local());
    } else {
      destination.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
      target.set_local(part_of(placed).local().clone());
    }
  }

  /// A plain destination counts as replicated, if it may.
  void put_whole(const at::Tensor& result, const at::Tensor& destination) const {
    const auto& name = op_.schema().name();
    TORCH_CHECK_VALUE(scopes().replicates_implicitly, name,
                      ": expected a distributed tensor for the result, got a plain one of sizes ",
                      destination.sizes(),
                      "; inside an ImplicitReplication scope a plain one takes the whole");
    const auto whole = redistributed(name.c_str(), result, replicated(*plan_.mesh));
    if (destination.sizes() != result.sizes()) destination.resize_(result.sizes());
    destination.copy_(part_of(whole).local());
  }

  bool is_destination(size_t argument) const {
    return std::any_of(plan_.destinations.begin(), plan_.destinations.end(),
                       [&](const auto& destination) { return destination.index == argument; });
  }

  void call(torch::jit::Stack& local) const {
    const LocalScope on_parts;
    const c10::Device device(plan_.mesh->mesh.device_type());
    std::optional<MeshGenerator> agreed;
    if (plan_.generator && local[*plan_.generator].isNone())
      local[*plan_.generator] = agreed.emplace(*plan_.mesh, device).get();
    if (plan_.draws_by_itself) require_one_state(op_.schema().name(), *plan_.mesh, device);
    if (plan_.rule != nullptr && plan_.rule->prepare) plan_.rule->prepare(op_.schema(), local);
    if (plan_.rule != nullptr && plan_.rule->run)
      return plan_.rule->run(op_, plan_.choice, plan_.input_sizes, local);
    call_boxed(op_, local);
  }

  /// A rank outside of the mesh holds nothing, but knows the shapes.
  torch::jit::Stack outside_results() const {
    torch::jit::Stack results;
    for (size_t i = 0; i < plan_.outputs.size(); ++i) {
      const auto& shapes = plan_.outputs[i].shapes;
      TORCH_CHECK(!shapes.empty(), op_.schema().name(), ": rank ", rank(), " is outside of ",
                  c10::str(plan_.mesh->mesh),
                  ", and what this operator returns can be told only inside; call it there alone");
      const c10::Device device(plan_.mesh->mesh.device_type());
      std::vector<at::Tensor> locals;
      for (const auto& shape : shapes)
        locals.push_back(empty_local(at::TensorOptions(device).dtype(shape.dtype)));
      const bool is_list = op_.schema().returns()[i].type()->kind() == c10::TypeKind::ListType;
      results.push_back(is_list ? c10::IValue(locals) : c10::IValue(locals[0]));
    }
    return results;
  }

  at::Tensor wrap_tensor(const CallPlan::Output& output, at::Tensor local, size_t position) const {
    if (!local.defined()) return local;
    at::Tensor result;
    if (output.shapes.empty()) {
      const auto& spec = *output.spec;
      const auto sizes = global_sizes_of_even(local.sizes(), spec.placements, spec.mesh_shape);
      const auto strides = dense_strides_like(sizes, local.strides());
      result = wrap(std::move(local), output.spec, sizes, strides);
    } else {
      const auto& shape = output.shapes[position];
      result = wrap(std::move(local), output.spec, shape.sizes, shape.strides);
    }
    if (!output.is_view || !stack_[base_].isTensor()) return result;
    const auto& base = stack_[base_].toTensor();
    if (has_part(base)) part_of(result).owner = part_of(base).owner;
    if (is_lost(part_of(result).local())) mark_lost(result, base);
    return result;
  }

  /// Whether a view has memory of its own, because its base was moved or could not be viewed so.
  bool is_lost(const at::Tensor& local) const {
    if (!plan_.moves.empty()) return true;
    const auto& base = stack_[base_].toTensor();
    if (!has_part(base)) return false;
    // A view of a lost one is lost, too; but gradients, often views, are kept detached and written.
    if (part_of(base).is_lost_view)
      return op_.schema().name() != "aten::detach" || !torch::autograd::get_current_node();
    return plan_.rule != nullptr && plan_.rule->run && !same_storage(local, part_of(base).local());
  }

  void wrap_output(const CallPlan::Output& output, c10::IValue& value) const {
    if (output.same_as) {
      const auto& argument = stack_[base_ + *output.same_as];
      if (is_destination(*output.same_as)) put(output, value.toTensor(), argument.toTensor());
      value = argument;
    } else if (value.isTensor()) {
      value = wrap_tensor(output, std::move(value).toTensor(), 0);
    } else if (value.isTensorList()) {
      auto locals = value.toTensorVector();
      for (size_t i = 0; i < locals.size(); ++i) locals[i] = wrap_tensor(output, locals[i], i);
      value = std::move(locals);
    }
  }

  const c10::OperatorHandle& op_;
  const CallPlan& plan_;
  torch::jit::Stack& stack_;
  const size_t arguments_;
  const size_t base_;
};

bool takes_plain(const c10::OperatorHandle& op) {
  if (scopes().rules == nullptr) return false;
  const auto* rule = find_rule(op);
  return rule != nullptr && rule->takes_plain;
}

bool keeps_sharded(const CallPlan& plan) {
  const auto any = [](const std::vector<Placements>& all) {
    return std::any_of(all.begin(), all.end(), [](const Placements& placements) {
      return std::any_of(placements.begin(), placements.end(),
                         [](const auto& placement) { return !placement.is_replicate(); });
    });
  };
  return any(plan.choice.inputs) || any(plan.choice.outputs);
}

/// Autograd replays views of distributed tensors if something is written into them: their strides
/// are not those of any memory. It asks right after the kernel; the next call takes this back, so
/// that views of plain tensors are not replayed for long.
void replay_views(bool on) {
  thread_local bool is_ours = false;
  auto& state = c10::AutogradState::get_tls_state();
  if (on && !state.get_view_replay_enabled()) {
    state.set_view_replay_enabled(true);
    is_ours = true;
  } else if (!on && is_ours) {
    state.set_view_replay_enabled(false);
    is_ours = false;
  }
}

bool makes_views(const CallPlan& plan) {
  return std::any_of(plan.outputs.begin(), plan.outputs.end(),
                     [](const auto& output) { return output.is_view; });
}

void run_plan(const c10::OperatorHandle& op, const CallPlan& plan, torch::jit::Stack& stack) {
  if (plan.rule == nullptr) note_missing_rule(op.schema());
  if (auto* counts = scopes().dispatch_counts.get())
    counts->add(op.operator_name(), plan.rule != nullptr, keeps_sharded(plan));
  Run(op, plan, stack)();
  replay_views(makes_views(plan));
}

}  // namespace

void check_plain(const c10::FunctionSchema& schema, std::span<const c10::IValue> arguments,
                 size_t index) {
  const auto& value = arguments[index];
  const auto check = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || has_part(tensor)) return;
    const bool is_number = tensor.numel() == 1;
    if (is_number && !(c10::GradMode::is_enabled() && tensor.requires_grad())) return;
    TORCH_CHECK(!is_number, schema.name(), ": argument '", schema.arguments()[index].name(),
                "' is a plain tensor that requires grad, beside distributed ones: its gradient "
                "would be distributed, and ranks may hold different values; make it distributed "
                "if all ranks hold the same (DTensor::from_local(tensor, mesh)), or make "
                "the others plain with full_tensor(), or call backward for each by itself");
    TORCH_CHECK(
        false, schema.name(), ": got a mix of distributed and plain tensors: argument '",
        schema.arguments()[index].name(), "' is a plain tensor of sizes ", tensor.sizes(),
        "; distribute it (distribute_tensor, DTensor::from_local), or, if all ranks hold the ",
        "same, run this inside an ImplicitReplication scope", hint_of_mix(schema, arguments));
  };
  if (value.isTensor()) return check(value.toTensor());
  if (!value.isList()) return;
  for (const auto& element : value.toListRef()) {
    if (element.isTensor()) check(element.toTensor());
  }
}

void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t base = stack->size() - schema.arguments().size();
  if (run_foreach(op, *stack)) return;

  thread_local CallKey key;
  thread_local Plans plans;
  key.clear();
  key.add(reinterpret_cast<uint64_t>(&schema));
  key.add(reinterpret_cast<uint64_t>(scopes().rules));
  for (size_t i = base; i < stack->size(); ++i) key.add((*stack)[i]);

  if (key.has_plain() && !scopes().replicates_implicitly && !takes_plain(op) &&
      !in_derivative_formula()) {
    const std::span<const c10::IValue> arguments(stack->data() + base, stack->size() - base);
    for (size_t i = 0; i < arguments.size(); ++i) check_plain(schema, arguments, i);
  }
  const auto known = key.is_complete() ? plans.find(&key) : plans.end();
  // Held here: what runs below may dispatch again and forget it.
  auto plan = known == plans.end() ? nullptr : known->second;
  if (!plan) {
    const auto used = key;
    plan = std::make_shared<const CallPlan>(
        make_plan(op, Call(schema, {stack->begin() + static_cast<long>(base), stack->end()})));
    if (plans.size() >= kRememberedPlans) plans.clear();
    if (used.is_complete()) plans.insert_or_assign(used, plan);
  }
  run_plan(op, *plan, *stack);
}

}  // namespace tessera::dtensor
