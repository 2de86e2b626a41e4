#pragma once

#include <tessera/compile/explain.h>
#include <tessera/compile/options.h>
#include <tessera/detail/compile/step_arguments.h>

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera::detail {

/// Runs a function, or the program made of it.
class Step {
 public:
  /// `function`: the object representation of the function, which stays where it is.
  explicit Step(CompileOptions options, std::span<const std::byte> function = {});
  ~Step();
  Step(Step&&) noexcept;

  /// What the function returns. `run` is the function; it sets `form` to what it returned, without
  /// tensors. If a program runs instead, `form` is that of the recorded call. Threads that call it
  /// at once take turns.
  std::vector<at::Tensor> call(const StepArguments& given,
                               c10::function_ref<std::vector<at::Tensor>()> run,
                               std::shared_ptr<const void>& form);

  std::string explain(const ExplainOptions& options = {}) const;
  std::string generated_code() const;
  std::string program_graph() const;
  const Graph* graph() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The bytes of a function object, or of the one that a std::reference_wrapper refers to; none if
/// there is nothing in it.
template <class F>
std::span<const std::byte> bytes_of_function(const F& function) {
  if constexpr (std::is_empty_v<F>)
    return {};
  else
    return std::as_bytes(std::span<const F>(&function, 1));
}
template <class F>
std::span<const std::byte> bytes_of_function(const std::reference_wrapper<F>& function) {
  if constexpr (std::is_function_v<F>)
    return {};
  else
    return bytes_of_function(function.get());
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

/// Adds up the sizes of the members that a struct lists for nn::visit_tensors.
struct MemberSizes {
  size_t* sum;
  template <class... Members>
  void operator()(Members&... /*members*/) const {
    static_assert((kIsTensors<Members> && ...),
                  "tessera::compile: expected a struct that is returned to hold tensors, or "
                  "vectors, tuples, pairs, optionals or maps of tensors");
    ((*sum += sizeof(Members)), ...);
  }
};

/// A struct of tensors that opts in with tessera_tensors (see nn/values.h).
template <class T>
concept TensorStruct = nn::detail::OptsIn<T> && std::default_initializable<T> &&
                       requires(T& value, MemberSizes sizes) { tessera_tensors(value, sizes); };

/// Throws a TypeError if the struct holds more than it lists: that would be what it was when the
/// program was made.
template <TensorStruct T>
void check_holds_tensors() {
  static const size_t kListed = [] {
    T value{};
    size_t sum = 0;
    tessera_tensors(value, MemberSizes{&sum});
    return sum;
  }();
  TORCH_CHECK_TYPE(kListed == sizeof(T), "compile: expected a struct that is returned to hold ",
                   "nothing but the tensors that its tessera_tensors lists, got ", sizeof(T),
                   " bytes, of which it lists ", kListed,
                   "; anything else would be what it was when the program was made");
}

template <class T>
void check_result() {
  static_assert(kIsTensors<T> || TensorStruct<T>,
                "tessera::compile: the function must return tensors, or vectors, tuples, pairs, "
                "optionals or maps of tensors, or a struct of these that opts in with "
                "tessera_tensors (see nn/values.h): anything else would be what it was when the "
                "program was made");
  if constexpr (!kIsTensors<T>) check_holds_tensors<T>();
}

template <class F, class... A>
constexpr void check_takes() {
  static_assert(std::invocable<F&, A&...>,
                "tessera::compile: expected a function that takes its arguments by value or "
                "reference, not as T&&: some calls run it more than once");
}

}  // namespace tessera::detail
