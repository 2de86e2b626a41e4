#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

/// Arguments that show memory of the caller's, and copies that own it.
namespace tessera::nn::detail {

/// A copy of an argument that owns what it shows; `as_declared` gives it the declared type back.
template <class T>
struct Owned {
  using Type = T;
  static Type copy(const T& value) { return value; }
  static T& as_declared(Type& owned) { return owned; }
};
template <class T>
struct Owned<c10::ArrayRef<T>> {
  using Type = std::vector<T>;
  static Type copy(c10::ArrayRef<T> value) { return value.vec(); }
  static c10::ArrayRef<T> as_declared(Type& owned) { return owned; }
};
template <class T>
struct Owned<std::span<T>> {
  using Type = std::vector<std::remove_const_t<T>>;
  static Type copy(std::span<T> value) { return Type(value.begin(), value.end()); }
  static std::span<T> as_declared(Type& owned) { return owned; }
};
template <>
struct Owned<at::ITensorListRef> {
  using Type = std::vector<at::Tensor>;
  static Type copy(at::ITensorListRef value) {
    Type owned;
    owned.reserve(value.size());
    for (const at::Tensor& tensor : value) owned.push_back(tensor);
    return owned;
  }
  static at::ITensorListRef as_declared(Type& owned) { return at::TensorList(owned); }
};
template <>
struct Owned<std::string_view> {
  using Type = std::string;
  static Type copy(std::string_view value) { return Type(value); }
  static std::string_view as_declared(Type& owned) { return owned; }
};
template <class T>
  requires(!std::is_same_v<typename Owned<T>::Type, T>)
struct Owned<std::optional<T>> {
  using Type = std::optional<typename Owned<T>::Type>;
  static Type copy(const std::optional<T>& value) {
    return value ? Type(Owned<T>::copy(*value)) : Type();
  }
  static std::optional<T> as_declared(Type& owned) {
    return owned ? std::optional<T>(Owned<T>::as_declared(*owned)) : std::nullopt;
  }
};

/// Views whose tensors can't be replaced through them.
template <class T>
inline constexpr bool kViewsTensors = false;
template <>
inline constexpr bool kViewsTensors<at::TensorList> = true;
template <>
inline constexpr bool kViewsTensors<c10::ArrayRef<std::optional<at::Tensor>>> = true;
template <>
inline constexpr bool kViewsTensors<at::ITensorListRef> = true;
template <>
inline constexpr bool kViewsTensors<std::span<const at::Tensor>> = true;
template <class T>
inline constexpr bool kViewsTensors<std::optional<T>> = kViewsTensors<T>;

}  // namespace tessera::nn::detail
