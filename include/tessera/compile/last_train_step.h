#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

namespace tessera {

/// Among the arguments of a compiled function it says whether this call is the last of a training.
/// The function is not given it. A call that is not the last may leave work to the next one, if the
/// pass "iter_move_grads_and_optimizers" was asked for (CompileConfig::fuse_ddp_passes): the update
/// of the parameters whose gradients are sent last. Until the next call of the same compiled
/// function, which begins with it, nobody reads or writes these parameters, their gradients and
/// their optimizer state. Without this argument, or with `true`, a call leaves nothing behind.
struct LastTrainStep {
  bool is_last = true;
};

namespace detail {

template <class T>
inline constexpr bool kIsLastTrainStep = std::is_same_v<std::remove_cvref_t<T>, LastTrainStep>;

template <class T>
bool is_last(const T& argument) {
  if constexpr (kIsLastTrainStep<T>)
    return argument.is_last;
  else
    return true;
}

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
