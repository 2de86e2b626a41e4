#include "nn/module_hooks.h"

#include <tessera/detail/nn/hook_point.h>

#include "base/capture.h"
#include "base/torch_versions.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

namespace tessera::nn {

/// One call of a module with backward hooks: identity nodes around it let autograd tell when the
/// gradients of its outputs and of its inputs are known. The nodes keep it alive.
class BackwardBoundary : public std::enable_shared_from_this<BackwardBoundary> {
 public:
  BackwardBoundary(torch::nn::Module& module, const ModuleHooks& hooks);

  void enter(const Arguments& arguments);
  void leave(const Result& result);

 private:
  void know_grad_outputs(std::vector<at::Tensor>& grad_outputs);
  void know_grad_inputs(std::vector<at::Tensor>& grad_inputs);

  torch::nn::Module& module_;
  std::shared_ptr<torch::nn::Module> alive_;  // null if the module is no shared_ptr's
  HookList<BackwardPreHook> before_;
  HookList<BackwardHook> after_;
  bool inputs_need_grad_ = false;
  size_t inputs_ = 0;
  // Known between the two ends of one backward.
  std::optional<std::vector<at::Tensor>> grad_outputs_;
};

namespace {

using Tensors = std::vector<at::Tensor>;
using GradFunction = std::function<void(Tensors& gradients)>;

/// Hands the gradients that come by to a function and passes on what it leaves.
class Identity final : public torch::autograd::Node {
 public:
  Identity(torch::autograd::edge_list next, GradFunction function)
      : Node(std::move(next)), function_(std::move(function)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    function_(gradients);
    return std::move(gradients);
  }
  std::string name() const override { return "TesseraBackwardHook"; }

 private:
  GradFunction function_;
};

/// The tensors of a call that need a gradient, and where they are among all of its tensors.
struct NeedGrad {
  Tensors tensors;
  std::vector<size_t> positions;
  size_t count = 0;

  explicit NeedGrad(c10::function_ref<void(TensorVisitor)> for_each) {
    for_each([&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.requires_grad()) {
        tensors.push_back(tensor);
        positions.push_back(count);
      }
      ++count;
    });
  }
};

/// The tensor as `node` gives it out: a view that refuses in-place operators, which would change
/// the caller's tensor behind the node's back. Layouts without views have few such operators.
at::Tensor behind(const at::Tensor& tensor, const NodePtr& node) {
  const bool has_views = tensor.layout() == at::kStrided && !tensor.is_nested();
  auto alias = has_views ? tensor.view_as(tensor) : tensor.detach();
  torch::autograd::create_gradient_edge(alias, node);
  if (has_views) {
    torch::autograd::impl::get_view_autograd_meta(alias)->set_creation_meta(
        torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
  }
  return alias;
}

/// Replaces the tensors that need a gradient by aliases behind an identity node. `function` sees
/// one gradient per tensor of the call, undefined for the others.
void put_boundary(const NeedGrad& need, c10::function_ref<void(TensorVisitor)> for_each,
                  const GradFunction& function) {
  auto spread = [function, positions = need.positions, count = need.count](Tensors& gradients) {
    Tensors all(count);
    for (size_t i = 0; i < positions.size(); ++i) all[positions[i]] = gradients[i];
    function(all);
    for (size_t i = 0; i < positions.size(); ++i) gradients[i] = all[positions[i]];
  };
  const auto node =
      make_node<Identity>(torch::autograd::collect_next_edges(need.tensors), std::move(spread));
  for_each([&](at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.requires_grad()) return;
    tensor = behind(tensor, node);
  });
}

}  // namespace

BackwardBoundary::BackwardBoundary(torch::nn::Module& module, const ModuleHooks& hooks)
    : module_(module),
      alive_(module.weak_from_this().lock()),
      before_(hooks.before_backward()),
      after_(hooks.after_backward()) {}

void BackwardBoundary::enter(const Arguments& arguments) {
  if (!c10::GradMode::is_enabled()) return;
  const auto for_each = [&](TensorVisitor visit) { arguments.for_each_tensor(visit); };
  const NeedGrad need(for_each);
  inputs_ = need.count;
  inputs_need_grad_ = !need.tensors.empty();
  if (!inputs_need_grad_ || after_.empty()) return;
  put_boundary(need, for_each, [self = shared_from_this()](Tensors& grad_inputs) {
    self->know_grad_inputs(grad_inputs);
  });
}

void BackwardBoundary::leave(const Result& result) {
  if (!c10::GradMode::is_enabled()) return;
  const auto for_each = [&](TensorVisitor visit) { result.for_each_tensor(visit); };
  const NeedGrad need(for_each);
  if (need.tensors.empty()) return;
  put_boundary(need, for_each, [self = shared_from_this()](Tensors& grad_outputs) {
    self->know_grad_outputs(grad_outputs);
  });
}

void BackwardBoundary::know_grad_outputs(Tensors& grad_outputs) {
  for (const auto& hook : before_) hook->run(module_, grad_outputs);
  if (inputs_need_grad_) {
    grad_outputs_ = grad_outputs;
    return;
  }
  for (const auto& hook : after_) {
    Tensors none(inputs_);
    hook->run(module_, none, grad_outputs);
  }
}

void BackwardBoundary::know_grad_inputs(Tensors& grad_inputs) {
  // Reached past the outputs, e.g. through a tensor that forward left in a member.
  if (!grad_outputs_) return;
  const auto grad_outputs = *std::exchange(grad_outputs_, std::nullopt);
  for (const auto& hook : after_) hook->run(module_, grad_inputs, grad_outputs);
}

}  // namespace tessera::nn

namespace tessera {
namespace nn {

std::atomic<int> HookPoint::watchers{0};

template <class Hook>
HookHandle ModuleHooks::insert(HookList<Hook>& hooks, Hook hook, bool prepend, bool always_call) {
  static std::atomic<uint64_t> made{0};
  auto entry =
      std::make_shared<HookEntry<Hook>>(HookEntry<Hook>{std::move(hook), always_call, ++made});
  hooks.insert(prepend ? hooks.begin() : hooks.end(), entry);
  refresh();
  return HookHandle([this, &hooks, weak = std::weak_ptr(entry), alive = std::weak_ptr(alive_)] {
    const auto entry = weak.lock();
    if (!entry || alive.expired()) return;
    std::erase(hooks, entry);
    refresh();
  });
}

HookHandle ModuleHooks::add(ForwardPreHook hook, ForwardPreHookOptions options) {
  return insert(before_, std::move(hook), options.prepend);
}

HookHandle ModuleHooks::add(ForwardHook hook, ForwardHookOptions options) {
  return insert(after_, std::move(hook), options.prepend, options.always_call);
}

HookHandle ModuleHooks::add(BackwardPreHook hook) {
  return insert(before_backward_, std::move(hook), /*prepend=*/false);
}

HookHandle ModuleHooks::add(BackwardHook hook) {
  return insert(after_backward_, std::move(hook), /*prepend=*/false);
}

void ModuleHooks::refresh() {
  point_.hooked_ = !before_.empty() || !after_.empty() || !before_backward_.empty() ||
                   !after_backward_.empty() || stand_in_;
}

ForwardStandIn ModuleHooks::exchange_stand_in(ForwardStandIn stand_in, bool for_good) {
  replaced_ += for_good ? 1 : 0;
  auto before = std::exchange(stand_in_, std::move(stand_in));
  refresh();
  return before;
}

uint64_t ModuleHooks::fingerprint() const {
  uint64_t hash = point_.module().is_training() ? 1 : 2;
  const auto add = [&](const auto& hooks) {
    for (const auto& hook : hooks) hash = hash * 0x9E3779B97F4A7C15ULL + hook->number;
    hash = hash * 31 + hooks.size();
  };
  add(before_);
  add(after_);
  add(before_backward_);
  add(after_backward_);
  return hash * 31 + replaced_;
}

std::function<uint64_t()> ModuleHooks::state_reader() const {
  // Not locked: who destroys a module while a step that calls it runs has a race in any case.
  return [this, alive = std::weak_ptr(alive_)]() -> uint64_t {
    return alive.expired() ? 0 : fingerprint();
  };
}

HookPoint::HookPoint(torch::nn::Module& module, const std::type_info& type,
                     std::span<const std::byte> object)
    : module_(module), object_(object) {
  name_after(module, type);
}
HookPoint::~HookPoint() = default;

ModuleHooks& HookPoint::hooks() {
  if (!hooks_) hooks_ = std::make_unique<ModuleHooks>(*this);
  return *hooks_;
}

struct HookPoint::Call::Snapshot {
  HookList<ForwardPreHook> before;
  HookList<ForwardHook> after;
  std::shared_ptr<BackwardBoundary> boundary;  // null without backward hooks
  size_t reached = 0;                          // hooks after forward that have been started
  capture::Observer* observer = nullptr;       // that was told of the call

  explicit Snapshot(HookPoint& point)
      : before(point.hooks().before()), after(point.hooks().after()) {
    const auto& hooks = point.hooks();
    if (!hooks.before_backward().empty() || !hooks.after_backward().empty())
      boundary = std::make_shared<BackwardBoundary>(point.module(), hooks);
  }
};

HookPoint::Call::Call(HookPoint& point, Arguments& arguments)
    : point_(point), arguments_(arguments), snapshot_(std::make_unique<Snapshot>(point)) {
  auto* observer = capture::observer();
  if (observer == nullptr || !observer->watches_modules()) return;
  observer->enter_module(point.module(), point.hooks().state_reader());
  snapshot_->observer = observer;
}
HookPoint::Call::~Call() {
  if (snapshot_->observer != nullptr) snapshot_->observer->leave_module();
}

// As in Python, the gradients that backward hooks see are those of the arguments that forward gets
// and of the result that the caller gets.
void HookPoint::Call::before() {
  for (const auto& hook : snapshot_->before) hook->run(point_.module(), arguments_);
  if (snapshot_->boundary) snapshot_->boundary->enter(arguments_);
}

bool HookPoint::Call::has_stand_in() const { return point_.hooks().stand_in() != nullptr; }

at::Tensor HookPoint::Call::run_stand_in() {
  const auto stand_in = point_.hooks().stand_in();  // a copy: it may be exchanged meanwhile
  return stand_in(point_.module(), arguments_);
}

void HookPoint::Call::after(Result result) {
  auto& hooks = snapshot_->after;
  while (snapshot_->reached < hooks.size()) {
    hooks[snapshot_->reached++]->run(point_.module(), arguments_, result);
  }
  if (snapshot_->boundary) snapshot_->boundary->leave(result);
}

void HookPoint::Call::failed() noexcept {
  auto& hooks = snapshot_->after;
  auto result = Result::failure();
  while (snapshot_->reached < hooks.size()) {
    const auto& hook = *hooks[snapshot_->reached++];
    if (!hook.always_call) continue;
    try {
      hook.run(point_.module(), arguments_, result);
    } catch (const std::exception& error) {
      // The first exception is on its way to the caller; a second one can only be told.
      TORCH_WARN("a hook that is always called threw after a failed forward: ", error.what());
    } catch (...) {
      TORCH_WARN("a hook that is always called threw after a failed forward");
    }
  }
}

HookPoint* find_hook_point(torch::nn::Module& module) {
  auto* hookable = dynamic_cast<Hookable*>(&module);
  return hookable ? &hookable->tessera_hook_point() : nullptr;
}

HookPoint& require_hook_point(torch::nn::Module& module, const char* function) {
  auto* point = find_hook_point(module);
  TORCH_CHECK_VALUE(point, function, ": expected a module whose calls can be hooked, got ",
                    name_of(module),
                    "; declare it with TESSERA_MODULE(Net) instead of TORCH_MODULE and make it as "
                    "Net net(...), not by std::make_shared<NetImpl>; of torch::nn's modules take "
                    "tessera::nn's");
  return *point;
}

namespace {

template <class Hook>
ModuleHooks& hooks_for(torch::nn::Module& module, const Hook& hook, const char* function) {
  TORCH_CHECK_VALUE(hook, function, ": expected a function, got an empty one");
  return require_hook_point(module, function).hooks();
}

}  // namespace
}  // namespace nn

HookHandle register_forward_pre_hook(nn::ModuleRef module, nn::ForwardPreHook hook,
                                     nn::ForwardPreHookOptions options) {
  return nn::hooks_for(module, hook, "register_forward_pre_hook").add(std::move(hook), options);
}

HookHandle register_forward_hook(nn::ModuleRef module, nn::ForwardHook hook,
                                 nn::ForwardHookOptions options) {
  return nn::hooks_for(module, hook, "register_forward_hook").add(std::move(hook), options);
}

HookHandle register_full_backward_pre_hook(nn::ModuleRef module, nn::BackwardPreHook hook) {
  return nn::hooks_for(module, hook, "register_full_backward_pre_hook").add(std::move(hook));
}

HookHandle register_full_backward_hook(nn::ModuleRef module, nn::BackwardHook hook) {
  return nn::hooks_for(module, hook, "register_full_backward_hook").add(std::move(hook));
}

bool is_hookable(nn::ModuleRef module) { return nn::find_hook_point(module) != nullptr; }

}  // namespace tessera

namespace tessera::nn {
namespace {

// libtorch keeps a module's name in a private member and makes it from typeid, which would say
// Hooked<…>. An explicit instantiation may name private members; this one hands out a pointer to
// it.
using Name = std::optional<std::string> torch::nn::Module::*;
Name name_member();
template <Name kMember>
struct Reveal {
  friend Name name_member() { return kMember; }
};
template struct Reveal<&torch::nn::Module::name_>;

}  // namespace

std::string detail::class_name(const std::type_info& type) { return c10::demangle(type.name()); }

void name_after(torch::nn::Module& module, const std::type_info& type) {
  auto& name = module.*name_member();
  if (!name) name = detail::class_name(type);
}

std::string name_of(const torch::nn::Module& module) { return module.name(); }

void detail::refuse_clone(const std::string& name, const char* why) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "clone_module: expected a module that can be cloned, but ",
                              name, " ", why,
                              "; build a second one and copy the values with load_state_dict");
}

void detail::refuse_null_module() {
  TORCH_CHECK_VALUE(false,
                    "expected a module, got an empty holder or a null pointer; make the "
                    "module first");
}

void detail::refuse_replay(const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "replay: expected arguments that can be copied, but a call of ", c10::demangle(what),
      " has one that can't; pass it by reference to "
      "something the module keeps, or checkpoint a smaller part");
}

void detail::refuse_stand_in(const char* what) {
  TORCH_CHECK_TYPE(false,
                   "expected a forward that returns one tensor where another function is to ",
                   "run in its place, but that of ", c10::demangle(what),
                   " returns something else; replace the modules inside of it");
}

}  // namespace tessera::nn
