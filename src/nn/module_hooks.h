#pragma once

#include <tessera/detail/nn/hook_point.h>

#include "nn/composable.h"

namespace tessera::nn {

/// A registered hook. Shared with the snapshots of running calls.
template <class Hook>
struct HookEntry {
  Hook run;
  bool always_call = false;
  uint64_t number = 0;  // no other entry has it, at any time
};
template <class Hook>
using HookList = std::vector<std::shared_ptr<HookEntry<Hook>>>;

/// What a hookable module carries besides the user's members.
class ModuleHooks {
 public:
  explicit ModuleHooks(HookPoint& point) : point_(point) {}

  HookHandle add(ForwardPreHook hook, ForwardPreHookOptions options);
  HookHandle add(ForwardHook hook, ForwardHookOptions options);
  HookHandle add(BackwardPreHook hook);
  HookHandle add(BackwardHook hook);

  /// Runs in place of forward, until another one does; empty: forward itself runs. Given back is
  /// the one before. `for_good`: programs made before are of no use any more.
  ForwardStandIn exchange_stand_in(ForwardStandIn stand_in, bool for_good = false);
  const ForwardStandIn& stand_in() const { return stand_in_; }

  const HookList<ForwardPreHook>& before() const { return before_; }
  const HookList<ForwardHook>& after() const { return after_; }
  const HookList<BackwardPreHook>& before_backward() const { return before_backward_; }
  const HookList<BackwardHook>& after_backward() const { return after_backward_; }
  ComposableStates& states() { return states_; }

  /// Reads a number that changes with training mode and with the hooks of the module, for as long
  /// as it exists; 0 afterwards.
  std::function<uint64_t()> state_reader() const;
  /// Expires with the module.
  std::weak_ptr<const void> lifetime() const { return alive_; }

 private:
  template <class Hook>
  HookHandle insert(HookList<Hook>& hooks, Hook hook, bool prepend, bool always_call = false);
  void refresh();
  uint64_t fingerprint() const;

  HookPoint& point_;
  HookList<ForwardPreHook> before_;
  HookList<ForwardHook> after_;
  HookList<BackwardPreHook> before_backward_;
  HookList<BackwardHook> after_backward_;
  ComposableStates states_;
  // Tells handles whether the module still exists.
  std::shared_ptr<ModuleHooks*> alive_ = std::make_shared<ModuleHooks*>(this);
  ForwardStandIn stand_in_;
  uint64_t replaced_ = 0;  // how often forward was replaced for good
};

/// Null if the module can't be hooked.
HookPoint* find_hook_point(torch::nn::Module& module);
/// Throws, naming the function, the module and the remedy, if the module can't be hooked.
HookPoint& require_hook_point(torch::nn::Module& module, const char* function);

/// Calls of all hookable modules go through HookPoint::Call, which tells this thread's
/// capture::Observer of them, while it lives.
class WatchCalls {
 public:
  WatchCalls() { ++HookPoint::watchers; }
  ~WatchCalls() { --HookPoint::watchers; }
  WatchCalls(const WatchCalls&) = delete;
  WatchCalls& operator=(const WatchCalls&) = delete;
};

/// Lets Module::name() say `type`, unless it has said something already.
void name_after(torch::nn::Module& module, const std::type_info& type);

}  // namespace tessera::nn
