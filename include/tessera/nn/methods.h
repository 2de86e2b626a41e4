#pragma once

#include <tessera/detail/nn/hooked.h>

namespace tessera::nn::detail {

/// A call of another entry point. Where it is not overloaded its declared types tell how to keep
/// the arguments; otherwise it gets copies.
template <class Entry, class Method, class Self, class... A>
decltype(auto) run_method(Self& self, A&&... arguments) {
  using R = decltype(Entry::call(self, std::forward<A>(arguments)...));
  if (!self.tessera_hook_point().is_hooked())
    return static_cast<R>(Entry::call(self, std::forward<A>(arguments)...));
  if constexpr (std::is_void_v<Method>) {
    return call_with_hooks<Self, Entry, R>(self, {}, Types<Given<A>...>{},
                                           std::forward<A>(arguments)...);
  } else {
    return call_with_hooks<Self, Entry, R>(
        self, {}, typename Signature<Method>::template First<sizeof...(A)>{},
        std::forward<A>(arguments)...);
  }
}

}  // namespace tessera::nn::detail

// Macros, because C++20 can't make a member function from a name.

#define TESSERA_NN_EXPAND(...) \
  TESSERA_NN_EXPAND_1(TESSERA_NN_EXPAND_1(TESSERA_NN_EXPAND_1(__VA_ARGS__)))
#define TESSERA_NN_EXPAND_1(...) TESSERA_NN_EXPAND_2(TESSERA_NN_EXPAND_2(__VA_ARGS__))
#define TESSERA_NN_EXPAND_2(...) __VA_ARGS__
#define TESSERA_NN_PARENS ()
#define TESSERA_NN_METHODS(Name, method, ...) \
  TESSERA_NN_METHOD(Name, method)             \
  __VA_OPT__(TESSERA_NN_METHODS_AGAIN TESSERA_NN_PARENS(Name, __VA_ARGS__))
#define TESSERA_NN_METHODS_AGAIN() TESSERA_NN_METHODS

#define TESSERA_NN_METHOD(Name, method)                                               \
  struct method##Entry {                                                              \
    template <class... A>                                                             \
    static decltype(auto) call(Base& self, A&&... arguments) {                        \
      return self.Name##Impl::method(std::forward<A>(arguments)...);                  \
    }                                                                                 \
    template <class... A>                                                             \
    static decltype(auto) enter(Base& self, A&&... arguments) {                       \
      return static_cast<Name##Methods&>(self).method(std::forward<A>(arguments)...); \
    }                                                                                 \
  };                                                                                  \
  template <class I>                                                                  \
  struct method##Signature {                                                          \
    using Type = void;                                                                \
  };                                                                                  \
  template <class I>                                                                  \
    requires requires { &I::method; }                                                 \
  struct method##Signature<I> {                                                       \
    using Type = decltype(&I::method);                                                \
  };                                                                                  \
  template <class... A>                                                               \
  decltype(auto) method(A&&... arguments) {                                           \
    using Method = typename method##Signature<Name##Impl>::Type;                      \
    return ::tessera::nn::detail::run_method<method##Entry, Method>(                  \
        static_cast<Base&>(*this), std::forward<A>(arguments)...);                    \
  }                                                                                   \
  template <class... A>                                                               \
    requires requires(const Name##Impl& impl, A&&... arguments) {                     \
      impl.method(std::forward<A>(arguments)...);                                     \
    }                                                                                 \
  decltype(auto) method(A&&... arguments) const {                                     \
    return const_cast<Name##Methods&>(*this).method(std::forward<A>(arguments)...);   \
  }

/// Beside TESSERA_MODULE(Name), once per module, before its first use and outside functions, with
/// all methods of NameImpl that are entry points too: a call `net->encode(x)` then runs the
/// module's hooks around `encode`, with its arguments and result. `forward` called from inside
/// `encode` runs none.
#define TESSERA_MODULE_METHOD(Name, ...)                                                         \
  template <class Base>                                                                          \
  class Name##Methods : public Base {                                                            \
   public:                                                                                       \
    using Base::Base;                                                                            \
    TESSERA_NN_EXPAND(TESSERA_NN_METHODS(Name, __VA_ARGS__))                                     \
  };                                                                                             \
  struct Name##MethodsTag {                                                                      \
    template <class Base>                                                                        \
    using Apply = Name##Methods<Base>;                                                           \
  };                                                                                             \
  [[maybe_unused]] constexpr Name##MethodsTag tessera_methods(const Name##Impl*) { return {}; }  \
  static_assert(std::is_same_v<::tessera::nn::detail::WithMethods<Name##Impl>,                   \
                               Name##Methods<::tessera::nn::detail::HookedBase<Name##Impl>>>,    \
                "TESSERA_MODULE_METHOD: expected to come before the module's first use; put it " \
                "next to TESSERA_MODULE")
