#include "compiler/kernels/prelude_math.h"

#include <algorithm>
#include <string_view>

namespace tessera::compiler {
namespace {

constexpr const char* kBits = R"(
inline uint32_t bits_of(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}
inline float from_bits(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}
)";

constexpr const char* kStore = R"(
template <class T>
T store(float number);
)";

constexpr const char* kBfloat16 = R"(
struct bfloat16 {
  uint16_t bits;
};
inline float load(bfloat16 number) { return from_bits(static_cast<uint32_t>(number.bits) << 16); }
template <>
inline bfloat16 store<bfloat16>(float number) {
  const uint32_t bits = bits_of(number);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(number != number ? 0x7fc0u : rounded)};
}
)";

// Below 2^-14 half has fixed-point numbers: adding 0.5 rounds to their unit.
constexpr const char* kFloat16 = R"(
struct float16 {
  uint16_t bits;
};
inline float load(float16 number) {
  const uint32_t bits = (number.bits & 0x7fffu) << 13;
  const float normal = from_bits(bits + (112u << 23));
  const float special = from_bits(bits + (224u << 23));
  const float small = from_bits(bits + (113u << 23)) - from_bits(113u << 23);
  const float magnitude = bits < (1u << 23) ? small : bits < (31u << 23) ? normal : special;
  return from_bits(bits_of(magnitude) | (static_cast<uint32_t>(number.bits & 0x8000u) << 16));
}
template <>
inline float16 store<float16>(float number) {
  const uint32_t sign = (bits_of(number) >> 16) & 0x8000u;
  const uint32_t bits = bits_of(number) & 0x7fffffffu;
  const uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const uint32_t small = bits_of(from_bits(bits) + 0.5f) - bits_of(0.5f);
  const uint32_t finite = bits < (113u << 23) ? small : bits < 0x477ff000u ? normal : 0x7c00u;
  return {static_cast<uint16_t>(sign | (number != number ? 0x7e00u : finite))};
}
)";

constexpr const char* kRounded = R"(
// The nearest number of 16 bits.
template <class T>
float rounded(float number) {
  return load(store<T>(number));
}
)";

// Compilers differ from processors in what they make of a constant that does not fit, so it is
// said. The barrier: GCC takes the way to an integer and back for trunc(), which keeps the sign of
// zero and numbers that no integer holds.
constexpr const char* kToInteger = R"(
// What does not fit, or is NaN, becomes what processors make of it: on x86 the least integer.
template <class Integer, class Number>
Integer to_integer(Number number) {
#if defined(__x86_64__)
  const uint64_t most = uint64_t{1} << (8 * sizeof(Integer) - 1);
  const Number limit = static_cast<Number>(most);
  const Integer least = static_cast<Integer>(uint64_t{0} - most);
  const bool fits = number >= -limit && number < limit;
  const Integer integer = fits ? static_cast<Integer>(number) : least;
#else
  const Integer integer = static_cast<Integer>(number);
#endif
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
  return __builtin_assoc_barrier(integer);
#else
  return integer;
#endif
}
)";

constexpr const char* kFma = R"(
namespace math {
#if defined(__FMA__) || defined(__aarch64__)
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
inline float fma(float a, float b, float c) { return a * b + c; }
inline double fma(double a, double b, double c) { return a * b + c; }
#endif
}  // namespace math
)";

constexpr const char* kExp = R"(
namespace math {
// 2^n * e^r with r in +-ln(2)/2. Adding 1.5 * 2^23 rounds to an integer, found in the low bits.
inline float exp(float x) {
  const float bounded = x > 89.f ? 89.f : x < -104.f ? -104.f : x;
  const float shifted = fma(bounded, 1.44269502f, 12582912.f);
  const float n = shifted - 12582912.f;
  const float r = fma(n, -1.42860677e-6f, fma(n, -0.693145752f, bounded));
  float p = fma(r, 1.39505032e-3f, 8.36890377e-3f);
  p = fma(p, r, 4.1666206e-2f);
  p = fma(p, r, 0.166665182f);
  p = fma(p, r, 0.5f);
  p = fma(p * r, r, r) + 1.f;
  // In two steps: 2^n itself may be too large or too small for a float.
  const int32_t power = static_cast<int32_t>(bits_of(shifted) - 0x4b400000u);
  const int32_t half = power >> 1;
  const float low = from_bits(static_cast<uint32_t>(half + 127) << 23);
  const float high = from_bits(static_cast<uint32_t>(power - half + 127) << 23);
  return p * low * high;
}
inline double exp(double x) { return std::exp(x); }
}  // namespace math
)";

constexpr const char* kExp2 = R"(
namespace math {
template <class T>
T exp2(T x) {
  return std::exp2(x);
}
}  // namespace math
)";

constexpr const char* kLog = R"(
namespace math {
// n * ln(2) + log(1 + f) with 1 + f in sqrt(1/2) to sqrt(2).
inline float log(float x) {
  const bool small = x < 1.17549435e-38f;
  const uint32_t bits = bits_of(small ? x * 8388608.f : x);
  const int32_t power = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float n = static_cast<float>(power) - (small ? 23.f : 0.f);
  const float f = from_bits(bits - (static_cast<uint32_t>(power) << 23)) - 1.f;
  float p = fma(f, 6.74645454e-2f, -0.116756231f);
  p = fma(p, f, 0.118882321f);
  p = fma(p, f, -0.124055974f);
  p = fma(p, f, 0.142195433f);
  p = fma(p, f, -0.166679949f);
  p = fma(p, f, 0.200021192f);
  p = fma(p, f, -0.250000089f);
  p = fma(p, f, 0.333333135f);
  const float square = f * f;
  const float tail = fma(n, 1.42860677e-6f, fma(square * f, p, -0.5f * square));
  const float y = fma(n, 0.693145752f, f + tail);
  const float finite = x < INFINITY ? y : INFINITY;
  return x > 0.f ? finite : x == 0.f ? -INFINITY : NAN;
}
inline double log(double x) { return std::log(x); }
}  // namespace math
)";

constexpr const char* kTanh = R"(
namespace math {
inline float tanh(float x) {
  const float size = std::fabs(x);
  const float z = x * x;
  float p = fma(z, 2.06464645e-3f, -8.09194427e-3f);
  p = fma(p, z, 2.16663349e-2f);
  p = fma(p, z, -5.39405607e-2f);
  p = fma(p, z, 0.133331582f);
  p = fma(p, z, -0.333333284f);
  const float small = fma(p * z, size, size);
  const float large = 1.f - 2.f / (exp(2.f * size) + 1.f);
  return std::copysign(size < 0.65f ? small : large, x);
}
inline double tanh(double x) { return std::tanh(x); }
}  // namespace math
)";

constexpr const char* kErf = R"(
namespace math {
inline float erf(float x) {
  const float z = x * x;
  float p = fma(z, -9.72209637e-6f, 1.1286189e-4f);
  p = fma(p, z, -8.48704076e-4f);
  p = fma(p, z, 5.22125093e-3f);
  p = fma(p, z, -2.68655177e-2f);
  p = fma(p, z, 0.112837844f);
  p = fma(p, z, -0.376126379f);
  const float small = x * fma(p, z, 1.12837917f);
  // From 1 to 4, log(1 - erf) is a polynomial; beyond, erf is 1.
  const float size = std::fabs(x);
  const float s = size > 4.f ? 4.f : size;
  float q = fma(s, -2.17079378e-5f, 4.41598531e-4f);
  q = fma(q, s, -4.20593005e-3f);
  q = fma(q, s, 2.52121408e-2f);
  q = fma(q, s, -0.108425066f);
  q = fma(q, s, -0.63321352f);
  q = fma(q, s, -1.12958181f);
  q = fma(q, s, 1.88806953e-4f);
  const float large = 1.f - exp(q);
  return size < 1.f ? small : std::copysign(large, x);
}
inline double erf(double x) { return std::erf(x); }
}  // namespace math
)";

constexpr const char* kGelu = R"(
namespace math {
template <class T>
T gelu(T x) {
  return x * T(0.5) * (1 + erf(x * T(0.70710678118654752440)));
}
)"
                              R"(template <class T>
T gelu_backward(T gradient, T x) {
  const T cdf = T(0.5) * (1 + erf(x * T(0.70710678118654752440)));
  const T pdf = T(0.39894228040143267794) * exp(x * x * T(-0.5));
  return gradient * (cdf + x * pdf);
}
}  // namespace math
)";

constexpr const char* kGeluTanh = R"(
namespace math {
template <class T>
T gelu_tanh(T x) {
  const T inner = T(0.79788456080286535588) * (x + T(0.044715) * (x * x * x));
  return T(0.5) * x * (1 + tanh(inner));
}
template <class T>
T gelu_tanh_backward(T gradient, T x) {
  const T square = x * x;
  const T inner = T(0.79788456080286535588) * (x + T(0.044715) * (square * x));
  const T t = tanh(inner);
  const T left = T(0.5) * (1 + t);
  const T slope = T(0.79788456080286535588) * (1 + T(3 * 0.044715) * square);
  return gradient * (left + T(0.5) * x * (1 - t * t) * slope);
}
}  // namespace math
)";

constexpr const char* kSiluBackward = R"(
namespace math {
template <class T>
T silu_backward(T gradient, T x) {
  const T s = 1 / (1 + exp(-x));
  return gradient * s * (1 + x * (1 - s));
}
}  // namespace math
)";

constexpr const char* kLerp = R"(
namespace math {
// From whichever end is nearer, so that both ends are met exactly.
template <class T>
T lerp(T start, T end, T weight) {
  return std::fabs(weight) < T(0.5) ? fma(weight, end - start, start)
                                    : fma(end - start, weight - 1, end);
}
}  // namespace math
)";

constexpr const char* kUniformText = R"(
namespace math {
// A number of [0, 1): Philox 4x32 of ten rounds, of whose four words neighbours take one each.
inline float uniform(int64_t seed, uint64_t element) {
  uint32_t first = static_cast<uint32_t>(element >> 2), second = static_cast<uint32_t>(element >> 34);
  uint32_t third = 0, fourth = 0;
  uint32_t low = static_cast<uint32_t>(seed);
  uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53} * first, right = uint64_t{0xCD9E8D57} * third;
    first = static_cast<uint32_t>(right >> 32) ^ second ^ low;
    third = static_cast<uint32_t>(left >> 32) ^ fourth ^ high;
    second = static_cast<uint32_t>(right);
    fourth = static_cast<uint32_t>(left);
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
  const uint32_t of_two = element & 1 ? second : first, of_others = element & 1 ? fourth : third;
  return static_cast<float>((element & 2 ? of_others : of_two) >> 8) * 0x1p-24f;
}
}  // namespace math
)";

constexpr const char* kBounds = R"(
namespace math {
// NaN if a number or a bound is.
template <class T>
T maximum(T a, T b) {
  return a != a ? a : a < b || b != b ? b : a;
}
template <class T>
T minimum(T a, T b) {
  return a != a ? a : a > b || b != b ? b : a;
}
template <class T>
T clamp(T number, T low, T high) {
  const T raised = number < low || low != low ? low : number;
  return raised > high || high != high ? high : raised;
}
}  // namespace math
)";

std::vector<SourcePiece> pieces_for(bool is_host) {
  std::vector<SourcePiece> pieces = {
      {"bits_of from_bits", kBits},
      {"store", kStore},
      {"bfloat16", kBfloat16},
      {"float16", kFloat16},
      {"rounded", kRounded},
      {"to_integer", kToInteger},
      {"fma", kFma},
      {"exp", kExp},
      {"exp2", kExp2},
      {"log", kLog},
      {"tanh", kTanh},
      {"erf", kErf},
      {"gelu gelu_backward", kGelu},
      {"gelu_tanh gelu_tanh_backward", kGeluTanh},
      {"silu_backward", kSiluBackward},
      {"lerp", kLerp},
      {"uniform", kUniformText},
      {"maximum minimum clamp", kBounds},
  };
  if (!is_host) {
    for (const SourcePiece& own : cuda_pieces())
      std::ranges::find(pieces, std::string_view(own.words), &SourcePiece::words)->text = own.text;
  }
  const auto float8 = float8_pieces(is_host);
  pieces.insert(std::ranges::find(pieces, std::string_view("rounded"), &SourcePiece::words),
                float8.begin(), float8.end());
  const auto of_rows = row_pieces(is_host);
  pieces.insert(pieces.end(), of_rows.begin(), of_rows.end());
  return pieces;
}

}  // namespace

const std::vector<SourcePiece>& math_pieces(c10::DeviceType device) {
  static const auto& host = *new std::vector<SourcePiece>(pieces_for(true));
  static const auto& cuda = *new std::vector<SourcePiece>(pieces_for(false));
  return device == c10::DeviceType::CPU ? host : cuda;
}

}  // namespace tessera::compiler
