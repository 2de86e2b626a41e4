#pragma once

#include <tessera/checkpoint/options.h>
#include <tessera/detail/nn/stored.h>
#include <tessera/nn/module_ref.h>

#include <functional>
#include <tuple>

/// How a checkpointed call is kept for its recomputation.
namespace tessera::detail::checkpoint {

/// Whether a call that starts here has anything to save: false without grad mode.
bool is_needed();

/// A scope after which norms in `module`, which must live on, have the running statistics they had
/// before it.
ScopeFactory keep_running_statistics(const torch::nn::Module& module);

/// One checkpointed call: tensors saved between its constructor and its destructor are dropped and
/// come back by running `again`, inside a scope of `around`. Constructed and destroyed on the same
/// thread, in the order of scopes.
class CallScope {
 public:
  CallScope(const char* function, CheckpointOptions options, nn::Replay again, ScopeFactory around);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;
  /// The forward has ended without an exception.
  void succeeded();

 private:
  struct Running;
  std::unique_ptr<Running> running_;
};

/// A module that is no holder's, kept by reference and, where a shared_ptr owns it, alive.
template <class M>
struct KeptModule {
  explicit KeptModule(M& given) : module(&given), alive(given.weak_from_this().lock()) {}
  M* module;
  std::shared_ptr<const torch::nn::Module> alive;
};

/// What is called. A constant holder calls its module all the same.
template <class F>
decltype(auto) callee(F&& function) {
  if constexpr (nn::ModuleLike<F>)
    return const_cast<std::remove_cvref_t<F>&>(function);
  else
    return std::forward<F>(function);
}

template <class F, class... A>
decltype(auto) call(F& function, A&&... arguments) {
  if constexpr (std::is_invocable_v<F&, A...>) {
    return std::invoke(function, std::forward<A>(arguments)...);
  } else if constexpr (requires { function.module->forward(std::forward<A>(arguments)...); }) {
    return function.module->forward(std::forward<A>(arguments)...);
  } else if constexpr (requires { function.forward(std::forward<A>(arguments)...); }) {
    return function.forward(std::forward<A>(arguments)...);
  } else {
    static_assert(
        requires { function->forward(std::forward<A>(arguments)...); },
        "checkpoint_call: expected something that can be called with these arguments");
    return function->forward(std::forward<A>(arguments)...);
  }
}

/// The function and the arguments of a call, given as A.
template <class F, class... A>
class KeptCall : public std::enable_shared_from_this<KeptCall<F, A...>> {
  static constexpr bool kIsModule = std::derived_from<F, torch::nn::Module>;
  static_assert(kIsModule || std::is_move_constructible_v<F>,
                "checkpoint_call: the function is kept for the recomputation, so it must be "
                "copyable; pass std::ref(function) and keep it alive until backward");
  static_assert((std::is_copy_constructible_v<std::decay_t<A>> && ...),
                "checkpoint_call: arguments are kept for the recomputation, so they must be "
                "copyable; pass std::ref(argument) and keep it alive until backward");
  template <class T>
  using Owned = nn::detail::Owned<std::decay_t<T>>;
  using Indices = std::index_sequence_for<A...>;

 public:
  template <class G>
  explicit KeptCall(G&& function, const std::remove_reference_t<A>&... arguments)
      : function_(std::forward<G>(function)), owned_(Owned<A>::copy(arguments)...) {}

  /// The forward: with the caller's own arguments.
  decltype(auto) run_first(A&&... arguments) {
    return call(function_, std::forward<A>(arguments)...);
  }
  nn::Replay replay() {
    auto kept = this->shared_from_this();
    return nn::Replay([kept] { kept->run(Indices{}); },
                      [kept](nn::TensorVisitor visit) { kept->visit(visit, Indices{}); });
  }
  /// What a recomputation must leave as it is.
  ScopeFactory around() {
    if constexpr (kIsModule)
      return keep_running_statistics(*function_.module);
    else if constexpr (nn::ModuleLike<F>)
      return keep_running_statistics(nn::as_module(function_));
    else
      return {};
  }

 private:
  /// As the caller gave it: an lvalue of the copy, or a temporary.
  template <class T>
  static decltype(auto) pass(typename Owned<T>::Type& owned) {
    if constexpr (std::is_lvalue_reference_v<T>)
      return Owned<T>::as_declared(owned);
    else
      return std::decay_t<T>(Owned<T>::as_declared(owned));
  }
  template <size_t... I>
  void run(std::index_sequence<I...>) {
    call(function_, pass<A>(std::get<I>(owned_))...);
  }
  template <size_t... I>
  void visit(nn::TensorVisitor visit, std::index_sequence<I...>) {
    (nn::visit_tensors(std::get<I>(owned_), visit), ...);
  }

  std::conditional_t<kIsModule, KeptModule<F>, F> function_;
  std::tuple<typename Owned<A>::Type...> owned_;
};

}  // namespace tessera::detail::checkpoint
