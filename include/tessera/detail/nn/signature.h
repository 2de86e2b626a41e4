#pragma once

#include <tessera/detail/nn/stored.h>

#include <torch/csrc/api/include/torch/detail/static.h>

#include <array>
#include <span>

/// What is known at compile time about the methods that are hooked.
namespace tessera::nn::detail {

template <class Method>
struct Signature;
#define TESSERA_NN_SIGNATURE(QUALIFIERS)                                                    \
  template <class R, class C, class... A>                                                   \
  struct Signature<R (C::*)(A...) QUALIFIERS> {                                             \
    using Returned = R;                                                                     \
    static constexpr unsigned kCount = sizeof...(A);                                        \
    template <class Indices>                                                                \
    struct Pick;                                                                            \
    template <size_t... I>                                                                  \
    struct Pick<std::index_sequence<I...>> {                                                \
      using Type = Types<std::tuple_element_t<I, std::tuple<A...>>...>;                     \
    };                                                                                      \
    template <size_t N>                                                                     \
    using First =                                                                           \
        typename Pick < std::make_index_sequence<N<sizeof...(A) ? N : sizeof...(A)>>::Type; \
  }
TESSERA_NN_SIGNATURE();
TESSERA_NN_SIGNATURE(const);
TESSERA_NN_SIGNATURE(noexcept);
TESSERA_NN_SIGNATURE(const noexcept);
#undef TESSERA_NN_SIGNATURE

template <class Impl>
concept HasOneForward = requires { &Impl::forward; };

/// Specialised for modules whose wrap needs no signature.
template <class Impl>
constexpr auto signature_of() {
  static_assert(HasOneForward<Impl>,
                "TESSERA_MODULE: forward must be one public function, not overloaded and no "
                "template; rename the others and name them in TESSERA_MODULE_METHOD");
  if constexpr (HasOneForward<Impl>) return std::type_identity<decltype(&Impl::forward)>{};
}

/// Of forward; 0 for a module whose wrap needs no signature.
template <class Impl>
constexpr unsigned parameter_count() {
  if constexpr (HasOneForward<Impl>)
    return Signature<decltype(&Impl::forward)>::kCount;
  else
    return 0;
}

template <class... Names>
std::array<const char*, sizeof...(Names)> names(Names... names) {
  return {names...};
}

/// Found by argument-dependent lookup where TESSERA_MODULE named the parameters.
template <class Impl>
std::span<const char* const> parameter_names() {
  if constexpr (requires(const Impl* impl) { tessera_parameter_names(impl); }) {
    static const auto kNames = tessera_parameter_names(static_cast<const Impl*>(nullptr));
    return kNames;
  } else {
    return {};
  }
}

}  // namespace tessera::nn::detail

namespace tessera::nn {

/// A module of class Impl whose calls can be hooked: derives from Impl and shadows its `forward` by
/// one of the very same signature, so that AnyModule can take its address. A call through a
/// reference to Impl, or from inside it, binds to the unhooked forward.
template <class Impl, class Signature = typename decltype(detail::signature_of<Impl>())::type>
class Hooked;

}  // namespace tessera::nn

/// libtorch's answer would make the class complete where its holder is declared: too early for a
/// TESSERA_MODULE_METHOD that follows.
template <class Impl, class Signature>
struct torch::detail::has_forward<tessera::nn::Hooked<Impl, Signature>> {
  static constexpr bool value = !std::is_void_v<Signature>;  // NOLINT: libtorch's name
};
