#pragma once

// Two bytes to float and back, with the instructions of the includer's instruction set.
// Internal to each translation unit that includes it: no symbol compiled for a newer instruction
// set can be picked by the linker for use on an older machine.

#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace tessera::comm::shm {
namespace {

struct Half {
  uint16_t bits;
};
struct BrainFloat {
  uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float widen(BrainFloat value) {
  return bits_to_float(static_cast<uint32_t>(value.bits) << 16);
}
inline BrainFloat narrow_to_brain(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);  // to nearest, ties to even
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return {static_cast<uint16_t>((is_nan ? bits | 0x00400000 : rounded) >> 16)};
}

#if defined(__F16C__)
inline float widen(Half value) { return _cvtsh_ss(value.bits); }
inline Half narrow_to_half(float value) {
  return {static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
}
#else
inline float widen(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t rest = value.bits & 0x7FFF;
  if (rest >= 0x7C00)
    return bits_to_float(sign | 0x7F800000 | ((rest & 0x3FF) << 13) |
                         (rest > 0x7C00 ? 0x400000 : 0));
  // Scaling by 2^112 rebases the exponent and is exact for subnormal halves too.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * bits_to_float(0x77800000)));
}
inline Half narrow_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000)
    return {static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF))};
  if (magnitude >= 0x47800000)
    return {static_cast<uint16_t>(sign | 0x7C00)};  // 65536 and more: infinity
  if (magnitude <
      0x38800000) {  // subnormal half: adding 0.5 lets the adder round to a multiple of 2^-24
    return {static_cast<uint16_t>(sign |
                                  (float_to_bits(bits_to_float(magnitude) + 0.5F) - 0x3F000000))};
  }
  const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
}
#endif

}  // namespace
}  // namespace tessera::comm::shm
