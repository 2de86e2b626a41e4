#pragma once

#include <tessera/detail/nn/call_frame.h>
#include <tessera/detail/nn/hooked_base.h>

#include <torch/csrc/api/include/torch/nn/pimpl.h>

namespace tessera::nn {

namespace detail {

/// The user's other entry points, where TESSERA_MODULE_METHOD named some.
template <class Impl>
struct MethodsOf {
  template <class Base>
  using Apply = Base;
};
template <class Impl>
  requires requires(const Impl* impl) { tessera_methods(impl); }
struct MethodsOf<Impl> : decltype(tessera_methods(static_cast<const Impl*>(nullptr))){};
template <class Impl>
using WithMethods = typename MethodsOf<Impl>::template Apply<HookedBase<Impl>>;

template <class Impl, class... G>
decltype(auto) run_forward(Hooked<Impl>& self, G&&... given);

/// What a module computes between its hooks. Specialised where torch::nn's own forward takes more
/// kernels than it needs.
template <class Impl>
struct PlainForward {
  template <class... A>
  static decltype(auto) run(Impl& self, A&&... arguments) {
    return self.Impl::forward(std::forward<A>(arguments)...);
  }
};

template <class Impl>
struct ForwardEntry {
  static constexpr bool kIsForward = true;
  template <class... A>
  static decltype(auto) call(Hooked<Impl>& self, A&&... arguments) {
    return PlainForward<Impl>::run(self, std::forward<A>(arguments)...);
  }
  template <class... A>
  static decltype(auto) enter(Hooked<Impl>& self, A&&... arguments) {
    return run_forward<Impl>(self, std::forward<A>(arguments)...);
  }
};

/// Impl's forward, with hooks if there are any. A: the declared types of its parameters.
template <class Impl, class R, class... A>
R forward_of(const Hooked<Impl>& const_self, A... arguments) {
  auto& self = const_cast<Hooked<Impl>&>(const_self);
  if (!self.tessera_hook_point().is_hooked()) [[likely]]
    return PlainForward<Impl>::run(self, std::forward<A>(arguments)...);
  return call_with_hooks<Hooked<Impl>, ForwardEntry<Impl>, R>(
      self, parameter_names<Impl>(), Types<A...>{}, std::forward<A>(arguments)...);
}

template <class Impl, class R, class... A, class... G>
R forward_of_first(Hooked<Impl>& self, Types<A...> /*declared*/, G&&... given) {
  return forward_of<Impl, R, A...>(self, std::forward<G>(given)...);
}

/// forward with hooks, also with fewer arguments where the user's forward has defaults.
template <class Impl, class... G>
decltype(auto) run_forward(Hooked<Impl>& self, G&&... given) {
  if constexpr (requires { self.forward(std::forward<G>(given)...); }) {
    return self.forward(std::forward<G>(given)...);
  } else {
    using Declared = Signature<decltype(&Impl::forward)>;
    return forward_of_first<Impl, typename Declared::Returned>(
        self, typename Declared::template First<sizeof...(G)>{}, std::forward<G>(given)...);
  }
}

}  // namespace detail

#define TESSERA_NN_HOOKED(CONST, NOEXCEPT)                                               \
  template <class Impl, class R, class C, class... A>                                    \
  class Hooked<Impl, R (C::*)(A...) CONST NOEXCEPT> : public detail::WithMethods<Impl> { \
   public:                                                                               \
    using detail::WithMethods<Impl>::WithMethods;                                        \
    R forward(A... arguments) CONST {                                                    \
      return detail::forward_of<Impl, R, A...>(*this, std::forward<A>(arguments)...);    \
    }                                                                                    \
  }
TESSERA_NN_HOOKED(, );
TESSERA_NN_HOOKED(const, );
TESSERA_NN_HOOKED(, noexcept);
TESSERA_NN_HOOKED(const, noexcept);
#undef TESSERA_NN_HOOKED

/// A holder whose call takes the defaults of the user's forward into account.
template <class Impl>
class HookedHolder : public torch::nn::ModuleHolder<Hooked<Impl>> {
 public:
  using torch::nn::ModuleHolder<Hooked<Impl>>::ModuleHolder;
  template <class... A>
  decltype(auto) operator()(A&&... arguments) {
    return detail::run_forward<Impl>(*this->get(), std::forward<A>(arguments)...);
  }
};

}  // namespace tessera::nn

/// Instead of TORCH_MODULE(Name): defines the holder `Name` of a hookable NameImpl. Further
/// arguments name forward's parameters, for hooks that look for one: TESSERA_MODULE(Net, "x"); then
/// not inside a function.
#define TESSERA_MODULE(Name, ...)                                                      \
  __VA_OPT__([[maybe_unused]] inline auto tessera_parameter_names(const Name##Impl*) { \
    return ::tessera::nn::detail::names(__VA_ARGS__);                                  \
  })                                                                                   \
  class Name : public ::tessera::nn::HookedHolder<Name##Impl> { /* NOLINT */           \
   public:                                                                             \
    using ::tessera::nn::HookedHolder<Name##Impl>::HookedHolder;                       \
    using Impl [[maybe_unused]] = ::tessera::nn::Hooked<Name##Impl>;                   \
  }
