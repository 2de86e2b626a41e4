#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/api/include/torch/ordered_dict.h>

#include <array>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

/// Finding the tensors inside arguments and results of any type.
namespace tessera::nn {

using TensorVisitor = c10::function_ref<void(at::Tensor&)>;

template <class T>
void visit_tensors(T& value, TensorVisitor visit);

/// What a user's struct is visited with; see visit_tensors.
class MemberVisitor {
 public:
  explicit MemberVisitor(TensorVisitor visit) : visit_(visit) {}
  template <class... Members>
  void operator()(Members&... members) const {
    (visit_tensors(members, visit_), ...);
  }

 private:
  TensorVisitor visit_;
};

namespace detail {

template <class T, template <class...> class Template>
inline constexpr bool kIsA = false;
template <template <class...> class Template, class... A>
inline constexpr bool kIsA<Template<A...>, Template> = true;

template <class T>
concept OptsIn = requires(T& value, MemberVisitor visitor) { tessera_tensors(value, visitor); };
template <class T>
concept TupleLike = requires { std::tuple_size<T>::value; };
template <class T>
inline constexpr bool kIsSequence =
    kIsA<T, std::vector> || kIsA<T, std::deque> || kIsA<T, std::list>;
template <class T>
inline constexpr bool kIsSequence<std::span<T>> = true;
template <>
inline constexpr bool kIsSequence<std::vector<bool>> = false;
template <class T>
inline constexpr bool kIsMap = kIsA<T, std::map> || kIsA<T, std::unordered_map>;

void visit_ivalue(c10::IValue& value, TensorVisitor visit);

}  // namespace detail

/// Calls `visit` with every tensor in `value`, which may be replaced: a tensor, or vectors, deques,
/// lists, spans, arrays, pairs, tuples, optionals, variants, maps, OrderedDicts, c10's Lists, Dicts
/// and IValues of such, and structs that opt in by a function beside them:
/// `void tessera_tensors(Batch& b, auto&& visit) { visit(b.x, b.y); }`.
/// Everything else is passed over: pointers, and views that can't be written through, such as
/// at::TensorList. (An argument of a hooked call that is one is seen as a std::vector.)
template <class T>
void visit_tensors(T& value, TensorVisitor visit) {
  if constexpr (std::is_const_v<T>) {
    // can't be replaced
  } else if constexpr (detail::OptsIn<T>) {
    tessera_tensors(value, MemberVisitor(visit));
  } else if constexpr (std::is_base_of_v<at::Tensor, T>) {
    visit(value);
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    detail::visit_ivalue(value, visit);
  } else if constexpr (detail::kIsA<T, std::optional>) {
    if (value) visit_tensors(*value, visit);
  } else if constexpr (detail::kIsA<T, std::variant>) {
    std::visit([&](auto& held) { visit_tensors(held, visit); }, value);
  } else if constexpr (detail::kIsMap<T>) {
    for (auto& entry : value) visit_tensors(entry.second, visit);
  } else if constexpr (detail::kIsA<T, torch::OrderedDict>) {
    for (auto& item : value) visit_tensors(item.value(), visit);
  } else if constexpr (detail::kIsA<T, c10::List> || detail::kIsA<T, c10::Dict>) {
    c10::IValue boxed(value);
    detail::visit_ivalue(boxed, visit);
    value = std::move(boxed).template to<T>();
  } else if constexpr (detail::kIsSequence<T>) {
    for (auto& element : value) visit_tensors(element, visit);
  } else if constexpr (detail::TupleLike<T>) {
    std::apply([&](auto&... elements) { (visit_tensors(elements, visit), ...); }, value);
  }
}

/// A function that repeats one call with its own copies of the arguments.
class Replay {
 public:
  Replay(std::function<void()> run, std::function<void(TensorVisitor)> visit)
      : run_(std::move(run)), visit_(std::move(visit)) {}
  void operator()() const { run_(); }
  /// The tensors among the copies, in order: what the next run is given.
  void for_each_tensor(TensorVisitor visit) const { visit_(visit); }

 private:
  std::function<void()> run_;
  std::function<void(TensorVisitor)> visit_;
};

}  // namespace tessera::nn
