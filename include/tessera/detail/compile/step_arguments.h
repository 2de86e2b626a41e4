#pragma once

#include <tessera/nn/module_ref.h>
#include <tessera/nn/values.h>

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

namespace tessera::detail {

/// What a compiled function was called with, as far as its program depends on it.
struct StepArguments {
  std::vector<at::Tensor> tensors;
  std::vector<uint64_t> numbers;  // guards: scalars bit by bit, of strings their hashes
  std::vector<torch::nn::Module*> modules;
  std::vector<torch::optim::Optimizer*> optimizers;
  bool leaves_work = false;  // the call may leave some to the next; see LastTrainStep

  void add_number(uint64_t bits) { numbers.push_back(bits); }
  /// All that is in it. Throws a TypeError if it holds what can't be compared.
  void add_value(const c10::IValue& value);
};

template <class T>
concept NumberLike = std::is_arithmetic_v<T> || std::is_enum_v<T>;

template <class T>
concept Iterable = requires(T& value) {
  value.begin();
  value.end();
};

/// Types of which tensors alone count.
template <class T>
inline constexpr bool kIsVisited = std::is_base_of_v<at::TensorBase, T> || nn::detail::OptsIn<T>;
/// Those of which all counts that they hold at run time.
template <class T>
inline constexpr bool kIsBoxed = std::is_same_v<T, c10::IValue> || nn::detail::kIsA<T, c10::List> ||
                                 nn::detail::kIsA<T, c10::Dict>;

template <class T>
void check_lists_all(T& argument);
/// Adds up the sizes of the members that a struct lists for nn::visit_tensors.
struct ListedSizes {
  size_t* sum;
  template <class... Members>
  void operator()(Members&... members) const {
    ((*sum += sizeof(Members)), ...);
    (check_lists_all(members), ...);
  }
};
/// Throws a TypeError if a struct that opts in with tessera_tensors holds more than it lists, of
/// which changes would not be seen.
template <class T>
void check_lists_all(T& argument) {
  if constexpr (nn::detail::OptsIn<T> &&
                requires(ListedSizes sizes) { tessera_tensors(argument, sizes); }) {
    size_t listed = 0;
    tessera_tensors(argument, ListedSizes{&listed});
    TORCH_CHECK_TYPE(listed == sizeof(T), "compile: expected a struct among the arguments to hold ",
                     "nothing but the tensors that its tessera_tensors lists, got ", sizeof(T),
                     " bytes, of which it lists ", listed,
                     "; pass anything else as an argument of its own, so that changes are seen");
  }
}

/// An argument, or what is in one.
template <class T>
void add_argument(StepArguments& given, T& argument) {
  using Plain = std::remove_cvref_t<T>;
  if constexpr (kIsVisited<Plain>) {
    check_lists_all(const_cast<Plain&>(argument));
    nn::visit_tensors(const_cast<Plain&>(argument),
                      [&](at::Tensor& tensor) { given.tensors.push_back(tensor); });
  } else if constexpr (kIsBoxed<Plain>) {
    given.add_value(c10::IValue(argument));
  } else if constexpr (nn::detail::kIsA<Plain, torch::OrderedDict>) {
    given.add_number(argument.size());
    for (auto& item : argument) {
      add_argument(given, item.key());
      add_argument(given, item.value());
    }
  } else if constexpr (std::derived_from<Plain, torch::optim::Optimizer>) {
    given.optimizers.push_back(&const_cast<Plain&>(argument));
  } else if constexpr (nn::ModuleLike<Plain>) {
    given.modules.push_back(&nn::as_module(argument));
  } else if constexpr (std::is_floating_point_v<Plain>) {
    given.add_number(std::bit_cast<uint64_t>(static_cast<double>(argument)));
  } else if constexpr (NumberLike<Plain>) {
    given.add_number(static_cast<uint64_t>(argument));
  } else if constexpr (std::is_convertible_v<const Plain&, std::string_view>) {
    given.add_number(std::hash<std::string_view>()(argument));
  } else if constexpr (std::is_same_v<Plain, std::vector<bool>>) {
    given.add_number(argument.size());
    given.add_number(std::hash<std::vector<bool>>()(argument));
  } else if constexpr (requires { argument.data, argument.target; }) {  // torch::data::Example
    add_argument(given, argument.data);
    add_argument(given, argument.target);
  } else if constexpr (Iterable<Plain>) {
    given.add_number(static_cast<uint64_t>(std::distance(argument.begin(), argument.end())));
    for (auto&& element : argument) add_argument(given, element);
  } else if constexpr (nn::detail::kIsA<Plain, std::optional>) {
    given.add_number(argument.has_value());
    if (argument) add_argument(given, *argument);
  } else if constexpr (nn::detail::kIsA<Plain, std::variant>) {
    given.add_number(argument.index());
    std::visit([&](auto& held) { add_argument(given, held); }, argument);
  } else {
    static_assert(nn::detail::TupleLike<Plain>,
                  "tessera::compile: expected arguments of tensors, modules, optimizers, numbers, "
                  "texts and containers of these: changes of anything else would not be seen; a "
                  "struct of tensors opts in with tessera_tensors (see nn/values.h)");
    std::apply([&](auto&... elements) { (add_argument(given, elements), ...); }, argument);
  }
}

}  // namespace tessera::detail
