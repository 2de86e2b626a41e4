#include "compiler/kernels/prelude_math.h"

namespace tessera::compiler {
namespace {

// What a GPU has of the pieces in prelude_math.cpp.
constexpr const char* kCudaBits = R"(
inline uint32_t bits_of(float number) { return __float_as_uint(number); }
inline float from_bits(uint32_t bits) { return __uint_as_float(bits); }
)";

constexpr const char* kCudaBfloat16 = R"(
struct bfloat16 {
  uint16_t bits;
};
inline float load(bfloat16 number) { return __uint_as_float(static_cast<uint32_t>(number.bits) << 16); }
template <>
inline bfloat16 store<bfloat16>(float number) {
  uint32_t pair;  // a single one is converted at an eighth of the rate
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.f), "f"(number));
  return {static_cast<uint16_t>(pair)};
}
// By pairs: one conversion for two, at the rate of additions.
template <int kCount>
Pack<bfloat16, kCount> packed(const Pack<float, kCount>& numbers, bfloat16) {
  Pack<bfloat16, kCount> result;
  for (int v = 0; v + 1 < kCount; v += 2) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(numbers.at[v + 1]), "f"(numbers.at[v]));
    result.at[v].bits = static_cast<uint16_t>(pair);
    result.at[v + 1].bits = static_cast<uint16_t>(pair >> 16);
  }
  if (kCount % 2 == 1) result.at[kCount - 1] = store<bfloat16>(numbers.at[kCount - 1]);
  return result;
}
)";

constexpr const char* kCudaFloat16 = R"(
struct float16 {
  uint16_t bits;
};
inline float load(float16 number) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(number.bits));
  return result;
}
template <>
inline float16 store<float16>(float number) {
  float16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(number));
  return result;
}
// By pairs: one conversion for two, at the rate of additions.
#if __CUDA_ARCH__ >= 800
template <int kCount>
Pack<float16, kCount> packed(const Pack<float, kCount>& numbers, float16) {
  Pack<float16, kCount> result;
  for (int v = 0; v + 1 < kCount; v += 2) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(numbers.at[v + 1]), "f"(numbers.at[v]));
    result.at[v].bits = static_cast<uint16_t>(pair);
    result.at[v + 1].bits = static_cast<uint16_t>(pair >> 16);
  }
  if (kCount % 2 == 1) result.at[kCount - 1] = store<float16>(numbers.at[kCount - 1]);
  return result;
}
#else
template <int kCount>
Pack<float16, kCount> packed(const Pack<float, kCount>& numbers, float16) {
  Pack<float16, kCount> result;
  for (int v = 0; v < kCount; ++v) result.at[v] = store<float16>(numbers.at[v]);
  return result;
}
#endif
)";

constexpr const char* kCudaToInteger = R"(
// What does not fit becomes the nearest integer, NaN zero.
template <class Integer, class Number>
Integer to_integer(Number number) {
  return static_cast<Integer>(number);
}
)";

constexpr const char* kCudaFma = R"(
namespace math {
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return ::fma(a, b, c); }
}  // namespace math
)";

constexpr const char* kCudaExp = R"(
namespace math {
inline float exp(float x) { return ::expf(x); }
inline double exp(double x) { return ::exp(x); }
}  // namespace math
)";

constexpr const char* kCudaExp2 = R"(
namespace math {
inline float exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
inline double exp2(double x) { return ::exp2(x); }
}  // namespace math
)";

constexpr const char* kCudaLog = R"(
namespace math {
inline float log(float x) { return ::logf(x); }
inline double log(double x) { return ::log(x); }
}  // namespace math
)";

constexpr const char* kCudaTanh = R"(
namespace math {
inline float tanh(float x) { return ::tanhf(x); }
inline double tanh(double x) { return ::tanh(x); }
}  // namespace math
)";

constexpr const char* kCudaErf = R"(
namespace math {
inline float erf(float x) { return ::erff(x); }
inline double erf(double x) { return ::erf(x); }
}  // namespace math
)";

// The normal distribution beyond |x| is exp(-x * x / 2) times a polynomial of 1 / (1 + 0.265 |x|),
// within 1.3e-8 of it: erff and expf would take twice the instructions.
constexpr const char* kCudaGelu = R"(
namespace math {
struct Normal {
  float cdf, power;  // exp(-x * x / 2)
};
inline Normal normal(float x) {
  const float t = __fdividef(1.f, ::fmaf(::fabsf(x), 0.26516504f, 1.f));
  float tail = ::fmaf(0.030769203f, t, -0.14366466f);
  tail = ::fmaf(tail, t, 0.21619858f);
  tail = ::fmaf(tail, t, -0.11470591f);
  tail = ::fmaf(tail, t, 0.13686186f);
  tail = ::fmaf(tail, t, 0.06075266f);
  tail = ::fmaf(tail, t, 0.1026567f);
  tail = ::fmaf(tail, t, 0.10532483f);
  tail = ::fmaf(tail, t, 0.10580674f);
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * x * -0.72134752f));
  tail *= t * power;
  return {x > 0 ? 1.f - tail : tail, power};
}
inline float gelu(float x) { return x * normal(x).cdf; }
inline float gelu_backward(float gradient, float x) {
  const Normal at = normal(x);
  return gradient * ::fmaf(x * 0.39894228f, at.power, at.cdf);
}
inline double gelu(double x) { return x * 0.5 * (1 + ::erf(x * 0.70710678118654752440)); }
inline double gelu_backward(double gradient, double x) {
  const double cdf = 0.5 * (1 + ::erf(x * 0.70710678118654752440));
  return gradient * (cdf + x * 0.39894228040143267794 * ::exp(x * x * -0.5));
}
}  // namespace math
)";

}  // namespace

std::vector<SourcePiece> cuda_pieces() {
  return {
      {"bits_of from_bits", kCudaBits},
      {"bfloat16", kCudaBfloat16},
      {"float16", kCudaFloat16},
      {"to_integer", kCudaToInteger},
      {"fma", kCudaFma},
      {"exp", kCudaExp},
      {"exp2", kCudaExp2},
      {"log", kCudaLog},
      {"tanh", kCudaTanh},
      {"erf", kCudaErf},
      {"gelu gelu_backward", kCudaGelu},
  };
}

}  // namespace tessera::compiler
