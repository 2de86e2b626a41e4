#pragma once

#include <tessera/compile/options.h>
#include <tessera/nn/values.h>

#include <c10/util/FunctionRef.h>

#include <concepts>
#include <memory>
#include <tuple>
#include <type_traits>

namespace tessera::detail {

/// What a compiled function was called with, as far as its program depends on it.
struct StepArguments {
  std::vector<at::Tensor> tensors;
  std::vector<double> numbers;
  std::vector<torch::nn::Module*> modules;
  std::vector<torch::optim::Optimizer*> optimizers;
};

/// Runs a function, or the program made of it.
class Step {
 public:
  explicit Step(CompileOptions options);
  ~Step();
  Step(Step&&) noexcept;

  /// The tensors that the function returns; `run` is the function.
  std::vector<at::Tensor> call(const StepArguments& given,
                               c10::function_ref<std::vector<at::Tensor>()> run);

  std::string explain() const;
  std::string generated_code() const;
  const Graph* graph() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

template <class T>
concept NumberLike = std::is_arithmetic_v<T> || std::is_enum_v<T>;

template <class T>
void add_argument(StepArguments& given, T& argument) {
  using Plain = std::remove_cvref_t<T>;
  if constexpr (std::derived_from<Plain, torch::optim::Optimizer>) {
    given.optimizers.push_back(&const_cast<Plain&>(argument));
  } else if constexpr (nn::ModuleLike<Plain>) {
    given.modules.push_back(&nn::as_module(argument));
  } else if constexpr (NumberLike<Plain>) {
    given.numbers.push_back(static_cast<double>(argument));
  } else {
    nn::visit_tensors(const_cast<Plain&>(argument),
                      [&](at::Tensor& tensor) { given.tensors.push_back(tensor); });
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
