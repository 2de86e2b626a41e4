#pragma once

#include <tessera/compile/options.h>
#include <tessera/nn/values.h>

#include <c10/util/FunctionRef.h>

#include <bit>
#include <concepts>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <variant>

namespace tessera::detail {

/// What a number among the arguments may be to a program; see Note [numbers among arguments].
enum class NumberKind : uint8_t {
  Fixed,  // a program is for this one
  Real,   // of a double
  Whole,  // of an int64_t
};

/// What a compiled function was called with, as far as its program depends on it.
struct StepArguments {
  std::vector<at::Tensor> tensors;
  std::vector<uint64_t> numbers;  // bit by bit; of texts their hashes
  std::vector<NumberKind> number_kinds;
  std::vector<torch::nn::Module*> modules;
  std::vector<torch::optim::Optimizer*> optimizers;

  void add_number(uint64_t bits, NumberKind kind = NumberKind::Fixed) {
    numbers.push_back(bits);
    number_kinds.push_back(kind);
  }
  /// All that is in it. Throws a TypeError if it holds what can't be compared.
  void add_value(const c10::IValue& value);
};

/// Runs a function, or the program made of it.
class Step {
 public:
  explicit Step(CompileOptions options);
  ~Step();
  Step(Step&&) noexcept;

  /// What the function returns, and of which kind the call was: a number, equal for calls that a
  /// program can't tell apart; kNoKind if the function ran as it is, and was not recorded by this.
  struct Outcome {
    std::vector<at::Tensor> tensors;
    size_t kind;
  };
  static constexpr size_t kNoKind = SIZE_MAX;
  /// `run` is the function. Threads that call it at once take turns.
  Outcome call(const StepArguments& given, c10::function_ref<std::vector<at::Tensor>()> run);

  std::string explain() const;
  std::string generated_code() const;
  const Graph* graph() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What a function returned, without its tensors, by kind of call.
class ResultShapes {
 public:
  void keep(size_t kind, std::shared_ptr<const void> shape) {
    const std::lock_guard lock(mutex_);
    shapes_[kind] = std::move(shape);
  }
  std::shared_ptr<const void> at(size_t kind) const {
    const std::lock_guard lock(mutex_);
    return shapes_.at(kind);
  }

 private:
  mutable std::mutex mutex_;
  std::map<size_t, std::shared_ptr<const void>> shapes_;
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

/// An argument, or what is in one.
template <class T>
void add_argument(StepArguments& given, T& argument) {
  using Plain = std::remove_cvref_t<T>;
  if constexpr (kIsVisited<Plain>) {
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
    given.add_number(std::bit_cast<uint64_t>(static_cast<double>(argument)), NumberKind::Real);
  } else if constexpr (NumberLike<Plain>) {
    constexpr bool kSteers = std::is_enum_v<Plain> || std::is_same_v<Plain, bool>;
    given.add_number(static_cast<uint64_t>(argument),
                     kSteers ? NumberKind::Fixed : NumberKind::Whole);
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

/// Whether a result of this type holds nothing but tensors: anything else would be that of the
/// call that was recorded.
template <class T>
inline constexpr bool kIsTensors = std::is_base_of_v<at::Tensor, T>;
template <class T>
inline constexpr bool kIsTensors<std::vector<T>> = kIsTensors<T>;
template <class T>
inline constexpr bool kIsTensors<std::optional<T>> = kIsTensors<T>;
template <class... T>
inline constexpr bool kIsTensors<std::tuple<T...>> = (kIsTensors<T> && ...);
template <class A, class B>
inline constexpr bool kIsTensors<std::pair<A, B>> = kIsTensors<A> && kIsTensors<B>;
template <class K, class T>
inline constexpr bool kIsTensors<std::map<K, T>> = kIsTensors<T>;

}  // namespace tessera::detail
