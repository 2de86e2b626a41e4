#pragma once

#include <tessera/compile/options.h>
#include <tessera/compile/step_arguments.h>

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera::detail {

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
