#pragma once

#include <tessera/detail/nn/owned.h>
#include <tessera/nn/values.h>

/// How a hooked call keeps its arguments: hooks may replace them before forward, and a replay needs
/// copies that live on.
namespace tessera::nn::detail {

/// A list of declared parameter types.
template <class... A>
struct Types {};

/// In a list of types: an argument whose declared type is unknown, given as an A. The callee gets a
/// copy, so that what hooks replace is not written into the caller's variable.
template <class A>
struct Given {};

/// How a parameter of declared type A is stored during the call. References to what can't be copied
/// whole, and references that forward may write through, are kept as they are.
template <class A>
class Stored {
 public:
  using Held = std::remove_cvref_t<A>;
  static constexpr bool kLvalue = std::is_lvalue_reference_v<A>;
  static constexpr bool kIsCopied =
      std::is_copy_constructible_v<Held> && !(kLvalue && std::is_polymorphic_v<Held>);
  static constexpr bool kByReference =
      (kLvalue && (!std::is_const_v<std::remove_reference_t<A>> || !kIsCopied)) ||
      !std::is_move_constructible_v<Held>;

  template <class G>
  explicit Stored(G&& given) : storage_(store(std::forward<G>(given))) {}

  auto& value() {
    if constexpr (kByReference)
      return *storage_;
    else
      return storage_;
  }
  /// What forward is given. Hooks after it look at the argument too, so it is copied, not moved,
  /// where that is possible.
  A pass() {
    if constexpr (kLvalue || (!std::is_reference_v<A> && std::is_copy_constructible_v<Held>))
      return value();
    else
      return std::move(value());
  }

 private:
  using Storage = std::conditional_t<kByReference, std::remove_reference_t<A>*, Held>;
  template <class G>
  static Storage store(G&& given) {
    if constexpr (kByReference)
      return &given;
    else
      return Storage(std::forward<G>(given));
  }
  Storage storage_;
};

template <class A>
class Stored<Given<A>> : public Stored<std::remove_cvref_t<A>> {
  using Base = Stored<std::remove_cvref_t<A>>;

 public:
  using Base::Base;
  std::conditional_t<std::is_lvalue_reference_v<A>, A, typename Base::Held> pass() {
    if constexpr (std::is_lvalue_reference_v<A>)
      return this->value();
    else
      return Base::pass();
  }
};
template <class T>
  requires(!std::is_copy_constructible_v<std::remove_cvref_t<T>>)
class Stored<Given<T&>> : public Stored<T&> {
 public:
  using Stored<T&>::Stored;
};

/// A view of tensors is kept as what it shows, so that hooks may replace them: a TensorList as a
/// std::vector<at::Tensor>. One that forward may redirect is left alone.
template <class A>
concept KeptView = kViewsTensors<std::remove_cvref_t<A>> &&
                   (!std::is_lvalue_reference_v<A> || std::is_const_v<std::remove_reference_t<A>>);

template <KeptView A>
class Stored<A> {
 public:
  using View = std::remove_cvref_t<A>;
  using Held = typename Owned<View>::Type;
  static constexpr bool kIsCopied = true;

  template <class G>
  explicit Stored(G&& given) : held_(hold(std::forward<G>(given))) {}

  Held& value() { return held_; }
  A pass() {
    declared_.emplace(Owned<View>::as_declared(held_));
    return static_cast<A>(*declared_);
  }

 private:
  template <class G>
  static Held hold(G&& given) {
    if constexpr (std::is_same_v<std::remove_cvref_t<G>, Held>)
      return std::forward<G>(given);
    else
      return Owned<View>::copy(View(given));
  }
  Held held_;
  std::optional<View> declared_;  // made when forward begins: hooks may have moved the tensors
};
template <class A>
  requires KeptView<std::remove_cvref_t<A>>
class Stored<Given<A>> : public Stored<std::remove_cvref_t<A>> {
 public:
  using Stored<std::remove_cvref_t<A>>::Stored;
};

}  // namespace tessera::nn::detail
