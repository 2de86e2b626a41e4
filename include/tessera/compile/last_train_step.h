#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

namespace tessera {

/// Among the arguments of a compiled function it says whether this call is the last of a training.
/// The function is not given it. No program leaves work for the next call, so nothing depends on
/// it.
struct LastTrainStep {
  bool is_last = true;
};

namespace detail {

template <class T>
inline constexpr bool kIsLastTrainStep = std::is_same_v<std::remove_cvref_t<T>, LastTrainStep>;

/// What the function is given of an argument.
template <class T>
auto handed_on(T&& argument) {
  if constexpr (kIsLastTrainStep<T>)
    return std::tuple<>();
  else
    return std::forward_as_tuple(std::forward<T>(argument));
}

}  // namespace detail

}  // namespace tessera
