#pragma once

#include <tessera/nn/values.h>

#include <c10/util/ArrayRef.h>

#include <string>
#include <string_view>

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

/// A copy of an argument that owns what it shows; `lend` gives it the declared type back.
template <class T>
struct Owned {
  using Type = T;
  static Type copy(const T& value) { return value; }
  static T& lend(Type& owned) { return owned; }
};
template <class T>
struct Owned<c10::ArrayRef<T>> {
  using Type = std::vector<T>;
  static Type copy(c10::ArrayRef<T> value) { return value.vec(); }
  static c10::ArrayRef<T> lend(Type& owned) { return owned; }
};
template <class T>
struct Owned<std::optional<c10::ArrayRef<T>>> {
  using Type = std::optional<std::vector<T>>;
  static Type copy(const std::optional<c10::ArrayRef<T>>& value) {
    return value ? Type(value->vec()) : Type();
  }
  static std::optional<c10::ArrayRef<T>> lend(Type& owned) {
    return owned ? std::optional<c10::ArrayRef<T>>(*owned) : std::nullopt;
  }
};
template <>
struct Owned<std::string_view> {
  using Type = std::string;
  static Type copy(std::string_view value) { return Type(value); }
  static std::string_view lend(Type& owned) { return owned; }
};

}  // namespace tessera::nn::detail
