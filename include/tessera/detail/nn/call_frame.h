#pragma once

#include <tessera/detail/nn/hook_point.h>
#include <tessera/detail/nn/stored.h>

#include <span>

/// One call of a hooked module: the arguments, kept for the hooks, and the way through.
namespace tessera::nn::detail {

/// Entry has `static R call(Self&, …)`, the module's own code, and `static R enter(Self&, …)`, the
/// same with hooks. A: the declared types of the parameters, or Given<…>.
template <class Self, class Entry, class R, class... A>
class CallFrame final : public Arguments {
 public:
  template <class... G>
  CallFrame(Self& self, std::span<const char* const> names, G&&... given)
      : self_(self), stored_(std::forward<G>(given)...) {
    values_.reserve(sizeof...(A));
    list(names, std::index_sequence_for<A...>{});
  }

  R invoke() { return invoke(std::index_sequence_for<A...>{}); }

  Replay replay() const override {
    if constexpr ((Stored<A>::kIsCopied && ...))
      return make_replay(std::index_sequence_for<A...>{});
    else
      refuse_replay(typeid(Self).name());
  }

 private:
  template <class T>
  using OwnedOf = Owned<typename Stored<T>::Held>;

  template <size_t... I>
  void list(std::span<const char* const> names, std::index_sequence<I...>) {
    (values_.emplace_back(std::get<I>(stored_).value(), I < names.size() ? names[I] : ""), ...);
  }
  template <size_t... I>
  R invoke(std::index_sequence<I...>) {
    return Entry::call(self_, std::get<I>(stored_).pass()...);
  }

  struct KeptCall {
    Self* self;
    std::shared_ptr<const torch::nn::Module> alive;  // null if the module is no shared_ptr's
    std::tuple<typename OwnedOf<A>::Type...> owned;

    template <size_t... I>
    void run(std::index_sequence<I...>) {
      Entry::enter(*self, Stored<A>(OwnedOf<A>::as_declared(std::get<I>(owned))).pass()...);
    }
  };
  template <size_t... I>
  Replay make_replay(std::index_sequence<I...> indices) const {
    auto& stored = const_cast<std::tuple<Stored<A>...>&>(stored_);
    auto replay =
        std::make_shared<KeptCall>(KeptCall{&self_, self_.weak_from_this().lock(),
                                            std::tuple<typename OwnedOf<A>::Type...>(
                                                OwnedOf<A>::copy(std::get<I>(stored).value())...)});
    return Replay(
        [replay, indices] { replay->run(indices); },
        [replay](TensorVisitor visit) { (visit_tensors(std::get<I>(replay->owned), visit), ...); });
  }

  Self& self_;
  std::tuple<Stored<A>...> stored_;
};

/// A call with hooks: before, the module's own code, after.
template <class Self, class Entry, class R, class... A, class... G>
R call_with_hooks(Self& self, std::span<const char* const> names, Types<A...> /*declared*/,
                  G&&... given) {
  static_assert(!std::is_reference_v<R>,
                "tessera: what a hooked call returns may be replaced, so it must be a value, not a "
                "reference; change the return type");
  CallFrame<Self, Entry, R, A...> frame(self, names, std::forward<G>(given)...);
  HookPoint::Call call(self.tessera_hook_point(), frame);
  try {
    call.before();
    constexpr bool kIsForward = requires { Entry::kIsForward; };
    if constexpr (kIsForward && !std::is_same_v<R, at::Tensor>)
      if (call.has_stand_in()) refuse_stand_in(typeid(Self).name());
    if constexpr (std::is_void_v<R>) {
      frame.invoke();
      call.after(Result());
    } else if constexpr (kIsForward && std::is_same_v<R, at::Tensor>) {
      R result = call.has_stand_in() ? call.run_stand_in() : frame.invoke();
      call.after(Result(Value(result, "")));
      return result;
    } else {
      R result = frame.invoke();
      call.after(Result(Value(result, "")));
      return result;
    }
  } catch (...) {
    call.failed();
    throw;
  }
}

}  // namespace tessera::nn::detail
