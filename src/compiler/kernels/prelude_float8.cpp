// Numbers of 8 bits in kernels, cast as ATen casts them.
#include "compiler/kernels/prelude_math.h"

#include <c10/util/Float8_e4m3fn.h>

#include <array>
#include <string>

namespace tessera::compiler {
namespace {

// As float16 of prelude_math.cpp: numbers below the least normal one are fixed-point, and adding
// the number whose last bit is their unit rounds to it. The sign of NaN is kept.
constexpr const char* kNarrow = R"(
struct float8_e4m3fn {
  unsigned char bits;
};
inline float load(float8_e4m3fn number) {
  const uint32_t bits = (number.bits & 0x7fu) << 20;
  const float normal = from_bits(bits + (120u << 23));
  const float small = from_bits(bits + (121u << 23)) - from_bits(121u << 23);
  const float magnitude = bits < (1u << 23) ? small : bits < (0x7fu << 20) ? normal : NAN;
  return from_bits(bits_of(magnitude) | (static_cast<uint32_t>(number.bits & 0x80u) << 24));
}
template <>
inline float8_e4m3fn store<float8_e4m3fn>(float number) {
  const uint32_t sign = (bits_of(number) >> 24) & 0x80u;
  const uint32_t bits = bits_of(number) & 0x7fffffffu;
  const uint32_t normal = (bits - (120u << 23) + 0x7ffffu + ((bits >> 20) & 1u)) >> 20;
  const uint32_t small = bits_of(from_bits(bits) + 16384.0f) - bits_of(16384.0f);
  // 464 is in the middle between the largest number and what would be the next.
  const uint32_t finite = bits < (121u << 23) ? small : bits <= 0x43e80000u ? normal : OVERFLOWu;
  return {static_cast<unsigned char>(sign | (number != number ? 0x7fu : finite))};
}
)";

constexpr const char* kWide = R"(
struct float8_e5m2 {
  unsigned char bits;
};
inline float load(float8_e5m2 number) {
  const uint32_t bits = (number.bits & 0x7fu) << 21;
  const float normal = from_bits(bits + (112u << 23));
  const float special = from_bits(bits + (224u << 23));
  const float small = from_bits(bits + (113u << 23)) - from_bits(113u << 23);
  const float magnitude = bits < (1u << 23) ? small : bits < (31u << 23) ? normal : special;
  return from_bits(bits_of(magnitude) | (static_cast<uint32_t>(number.bits & 0x80u) << 24));
}
template <>
inline float8_e5m2 store<float8_e5m2>(float number) {
  const uint32_t sign = (bits_of(number) >> 24) & 0x80u;
  const uint32_t bits = bits_of(number) & 0x7fffffffu;
  const uint32_t normal = (bits - (112u << 23) + 0xfffffu + ((bits >> 21) & 1u)) >> 21;
  const uint32_t small = bits_of(from_bits(bits) + 128.0f) - bits_of(128.0f);
  const uint32_t finite = bits < (113u << 23) ? small : bits < 0x47800000u ? normal : OVERFLOWu;
  return {static_cast<unsigned char>(sign | (number != number ? 0x7fu : finite))};
}
)";

// From sm_89 on one instruction rounds two numbers; it saturates.
constexpr const char* kCudaStore = R"(#if __CUDA_ARCH__ >= 890
inline FLOAT8 mended(float number, uint32_t saturated, FLOAT8) {
  const uint32_t sign = (bits_of(number) >> 24) & 0x80u;
  const uint32_t special = number != number ? 0x7fu : OVERFLOWu;
  const bool fits = ::fabsf(number) FITS;
  return {static_cast<unsigned char>(fits ? saturated : sign | special)};
}
template <>
inline FLOAT8 store<FLOAT8>(float number) {
  uint16_t pair;
  asm("cvt.rn.satfinite.PAIR.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(number));
  return mended(number, pair & 0xffu, FLOAT8{});
}
template <int kCount>
Pack<FLOAT8, kCount> packed(const Pack<float, kCount>& numbers, FLOAT8) {
  Pack<FLOAT8, kCount> result;
  for (int v = 0; v + 1 < kCount; v += 2) {
    uint16_t pair;
    asm("cvt.rn.satfinite.PAIR.f32 %0, %1, %2;"
        : "=h"(pair) : "f"(numbers.at[v + 1]), "f"(numbers.at[v]));
    result.at[v] = mended(numbers.at[v], pair & 0xffu, FLOAT8{});
    result.at[v + 1] = mended(numbers.at[v + 1], pair >> 8, FLOAT8{});
  }
  if (kCount % 2 == 1) result.at[kCount - 1] = store<FLOAT8>(numbers.at[kCount - 1]);
  return result;
}
#else
)";

constexpr const char* kCudaPacked = R"(template <int kCount>
Pack<FLOAT8, kCount> packed(const Pack<float, kCount>& numbers, FLOAT8) {
  Pack<FLOAT8, kCount> result;
  for (int v = 0; v < kCount; ++v) result.at[v] = store<FLOAT8>(numbers.at[v]);
  return result;
}
#endif
)";

void replace_each(std::string& text, const std::string& word, const std::string& by) {
  for (auto at = text.find(word); at != std::string::npos; at = text.find(word, at + by.size()))
    text.replace(at, word.size(), by);
}

struct Float8 {
  const char* name;
  const char* host;      // its piece
  const char* pair;      // in the instruction
  const char* fits;      // what it does not saturate
  const char* overflow;  // bits of numbers beyond, but for the sign
};

/// Of numbers beyond the largest libtorch makes NaN, in later versions the largest; ask this one.
const char* narrow_overflow() { return c10::Float8_e4m3fn(1e4F).x == 0x7e ? "0x7e" : "0x7f"; }

std::string float8_text(const Float8& type, bool is_host) {
  std::string text = type.host;
  if (!is_host) text = text.insert(text.find("template <>"), kCudaStore) + kCudaPacked;
  replace_each(text, "FLOAT8", type.name);
  replace_each(text, "PAIR", type.pair);
  replace_each(text, "FITS", type.fits);
  replace_each(text, "OVERFLOW", type.overflow);
  return text;
}

}  // namespace

std::vector<SourcePiece> float8_pieces(bool is_host) {
  static const Float8 narrow = {"float8_e4m3fn", kNarrow, "e4m3x2", "<= 464.f", narrow_overflow()};
  static const Float8 wide = {"float8_e5m2", kWide, "e5m2x2", "< 61440.f", "0x7c"};
  using Texts = std::array<std::string, 2>;
  static const auto& of_host = *new Texts{float8_text(narrow, true), float8_text(wide, true)};
  static const auto& of_cuda = *new Texts{float8_text(narrow, false), float8_text(wide, false)};
  const auto& texts = is_host ? of_host : of_cuda;
  return {{narrow.name, texts[0].c_str()}, {wide.name, texts[1].c_str()}};
}

}  // namespace tessera::compiler
