#include <tessera/nn/hook_point.h>

#include "base/capture.h"
#include "nn/backward_passage.h"
#include "nn/module_hooks.h"

#include <c10/util/Exception.h>

#include <algorithm>

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
  std::shared_ptr<BackwardPassage> passage;  // null without backward hooks
  size_t reached = 0;                        // hooks after forward that have been started
  capture::Observer* observer = nullptr;     // that was told of the call

  explicit Snapshot(HookPoint& point)
      : before(point.hooks().before()), after(point.hooks().after()) {
    const auto& hooks = point.hooks();
    if (!hooks.before_backward().empty() || !hooks.after_backward().empty())
      passage = std::make_shared<BackwardPassage>(point.module(), hooks);
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
  if (snapshot_->passage) snapshot_->passage->enter(arguments_);
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
  if (snapshot_->passage) snapshot_->passage->leave(result);
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
