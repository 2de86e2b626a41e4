#pragma once

#include <tessera/nn/hooks.h>

#include <atomic>
#include <cstddef>
#include <span>

namespace tessera::nn {

class ModuleHooks;

/// The part of a hookable module that holds its hooks.
class HookPoint {
 public:
  /// `type`: the user's class, for Module::name(), which would say Hooked<…> otherwise; `object`:
  /// its object representation.
  HookPoint(torch::nn::Module& module, const std::type_info& type,
            std::span<const std::byte> object);
  ~HookPoint();
  HookPoint(const HookPoint&) = delete;
  HookPoint& operator=(const HookPoint&) = delete;

  torch::nn::Module& module() const { return module_; }
  /// The bytes of the user's class, libtorch's part included. A compiled step compares them.
  std::span<const std::byte> object() const { return object_; }
  /// Whether a call must go through Call; false is the fast path.
  bool is_hooked() const { return hooked_ || watchers.load(std::memory_order_relaxed) > 0; }
  /// How many recorders want to know of all calls; see WatchCalls.
  static std::atomic<int> watchers;
  ModuleHooks& hooks();

  /// One call, from the first pre-hook to the last hook. Hooks added or removed meanwhile count
  /// from the next call on.
  class Call {
   public:
    Call(HookPoint& point, Arguments& arguments);
    ~Call();
    void before();
    /// Whether another function runs in place of forward, and what it returns.
    bool has_stand_in() const;
    at::Tensor run_stand_in();
    void after(Result result);
    /// Runs what must always be called and has not been yet. For use in a catch block: throws
    /// nothing.
    void failed() noexcept;

   private:
    struct Snapshot;
    HookPoint& point_;
    Arguments& arguments_;
    std::unique_ptr<Snapshot> snapshot_;
  };

 private:
  friend class ModuleHooks;
  torch::nn::Module& module_;
  bool hooked_ = false;
  std::unique_ptr<ModuleHooks> hooks_;
  std::span<const std::byte> object_;
};

/// Base of every hookable module. One name alone, and a long one: it shares a scope with the user's
/// members.
class Hookable {
 public:
  virtual HookPoint& tessera_hook_point() = 0;

 protected:
  ~Hookable() = default;
};

namespace detail {

std::string class_name(const std::type_info& type);
[[noreturn]] void refuse_clone(const std::string& name, const char* why);
/// Throws if a composable function is applied to the module: a copy would not have it.
void check_clonable(const torch::nn::Module& module);
[[noreturn]] void refuse_replay(const char* what);
[[noreturn]] void refuse_stand_in(const char* what);

}  // namespace detail
}  // namespace tessera::nn
