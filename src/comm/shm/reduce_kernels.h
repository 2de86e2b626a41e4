#pragma once

// The element-wise kernels, compiled once per instruction set and free of libtorch.
// Internal to each translation unit that includes it: no symbol compiled for a newer instruction
// set can be picked by the linker for use on an older machine.

#include "comm/shm/half_types.h"
#include "comm/shm/reduce.h"

#include <complex>
#include <type_traits>

namespace tessera::comm::shm {
namespace {

struct Boolean {
  uint8_t byte;
};

// The type a sum is accumulated in, and the way there and back.
template <class T>
struct Accumulator {
  using Type = T;
};
template <>
struct Accumulator<Half> {
  using Type = float;
};
template <>
struct Accumulator<BrainFloat> {
  using Type = float;
};
template <>
struct Accumulator<Boolean> {
  using Type = uint8_t;
};

template <class T>
inline typename Accumulator<T>::Type load(T value) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BrainFloat>)
    return widen(value);
  else if constexpr (std::is_same_v<T, Boolean>)
    return value.byte != 0;
  else
    return value;
}
template <class T>
inline T store(typename Accumulator<T>::Type value) {
  if constexpr (std::is_same_v<T, Half>)
    return narrow_to_half(value);
  else if constexpr (std::is_same_v<T, BrainFloat>)
    return narrow_to_brain(value);
  else if constexpr (std::is_same_v<T, Boolean>)
    return {static_cast<uint8_t>(value != 0)};
  else
    return value;
}

template <Reduction op, class A>
inline A combine(A left, A right) {
  if constexpr (op == Reduction::Sum || op == Reduction::Avg)
    return static_cast<A>(left + right);
  else if constexpr (op == Reduction::Product)
    return static_cast<A>(left * right);
  // A NaN on either side wins, as in torch.minimum and torch.maximum.
  else if constexpr (op == Reduction::Min)
    return (left != left || left < right) ? left : right;
  else if constexpr (op == Reduction::Max)
    return (left != left || left > right) ? left : right;
  else if constexpr (op == Reduction::And)
    return static_cast<A>(left & right);
  else if constexpr (op == Reduction::Or)
    return static_cast<A>(left | right);
  else
    return static_cast<A>(left ^ right);
}

template <Reduction op, class A>
inline A finish(A value, int input_count) {
  if constexpr (op == Reduction::Avg) {
    if constexpr (std::is_floating_point_v<A>)
      return value / static_cast<A>(input_count);
    else
      return value / static_cast<typename A::value_type>(input_count);
  } else {
    return value;
  }
}

template <class T, Reduction op>
void reduce_two(T* out, const T* first, const T* second, size_t count) {
#pragma GCC ivdep  // `out` may be one of the inputs, element for element
  for (size_t i = 0; i < count; ++i) {
    out[i] = store<T>(finish<op>(combine<op>(load(first[i]), load(second[i])), 2));
  }
}

template <class T, Reduction op>
void reduce_many(void* out_bytes, const void* const* inputs, int input_count, size_t count) {
  using A = typename Accumulator<T>::Type;
  auto* out = static_cast<T*>(out_bytes);
  if (input_count == 2) {
    return reduce_two<T, op>(out, static_cast<const T*>(inputs[0]),
                             static_cast<const T*>(inputs[1]), count);
  }
  constexpr size_t kTile = 1024;  // stays in the first-level cache
  A tile[kTile];
  for (size_t begin = 0; begin < count; begin += kTile) {
    const size_t length = count - begin < kTile ? count - begin : kTile;
    const auto* first = static_cast<const T*>(inputs[0]) + begin;
    for (size_t i = 0; i < length; ++i) tile[i] = load(first[i]);
    for (int k = 1; k < input_count; ++k) {
      const auto* input = static_cast<const T*>(inputs[k]) + begin;
      for (size_t i = 0; i < length; ++i)
        tile[i] = combine<op>(tile[i], static_cast<A>(load(input[i])));
    }
#pragma GCC ivdep
    for (size_t i = 0; i < length; ++i) out[begin + i] = store<T>(finish<op>(tile[i], input_count));
  }
}

}  // namespace
}  // namespace tessera::comm::shm
