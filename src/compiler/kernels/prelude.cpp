#include "compiler/kernels/prelude.h"

#include "compiler/kernels/prelude_math.h"

#include <c10/util/Float8_e4m3fn.h>

#include <array>
#include <cctype>
#include <sstream>
#include <string>
#include <vector>

namespace tessera::compiler {
namespace {

constexpr const char* kSum = R"(
struct Sum {
  template <class T>
  static T of(T a, T b) {
    return a + b;
  }
};
)";

constexpr const char* kLargest = R"(
struct Largest {
  template <class T>
  static T of(T a, T b) {
    return math::maximum(a, b);
  }
};
)";

// NaN if either is, by one instruction.
constexpr const char* kCudaLargest = R"(
struct Largest {
  static double of(double a, double b) { return math::maximum(a, b); }
  static float of(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(a), "f"(b));
    return largest;
#else
    return math::maximum(a, b);
#endif
  }
};
)";

constexpr const char* kAcrossLanes = R"(
template <class Combine, class T, int kLanes>
T across(T (&lanes)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int v = 0; v < half; ++v) lanes[v] = Combine::of(lanes[v], lanes[v + half]);
  }
  return lanes[0];
}
)";

// Every thread has the result, of the same order of operations.
constexpr const char* kAcrossThreads = R"(
template <class Combine, class T>
T across_warp(T value) {
  for (int step = 16; step > 0; step /= 2)
    value = Combine::of(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}
// Of kThreads neighbours; `shared` has a place per warp of the block.
template <class Combine, int kThreads, class T>
T across_block(T value, T* shared) {
  value = across_warp<Combine>(value);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) shared[warp] = value;
  __syncthreads();
  constexpr int kWarps = kThreads / 32;
  const T* const own = shared + warp / kWarps * kWarps;
  value = own[0];
  for (int i = 1; i < kWarps; ++i) value = Combine::of(value, own[i]);
  __syncthreads();
  return value;
}
)";

// Bytes of shared memory that the launch gives to a block.
constexpr const char* kSharedSize = R"(
inline unsigned shared_size() {
  unsigned size;
  asm("mov.u32 %0, %dynamic_smem_size;" : "=r"(size));
  return size;
}
)";

}  // namespace

std::vector<SourcePiece> row_pieces(bool is_host) {
  std::vector<SourcePiece> pieces = {
      {"Sum", kSum},
      {"Largest", is_host ? kLargest : kCudaLargest},
      {"across across_warp across_block", is_host ? kAcrossLanes : kAcrossThreads},
  };
  if (!is_host) pieces.push_back({"shared_size", kSharedSize});
  return pieces;
}

// Numbers of 8 bits in kernels, cast as ATen casts them.

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

namespace {

// Host is that of host_library.h.
constexpr const char* kHostPrelude = R"source(#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// Calls `part` for ranges that make up [0, count), on several threads if they can be `grain` long.
struct Host {
  void (*run)(int64_t count, int64_t grain, void (*part)(const void*, int64_t, int64_t),
              const void* closure);

  template <class Part>
  void parallel(int64_t count, int64_t grain, const Part& part) const {
    run(
        count, grain,
        [](const void* closure, int64_t begin, int64_t end) {
          (*static_cast<const Part*>(closure))(begin, end);
        },
        &part);
  }
};

}  // namespace

// INDEPENDENT: no iteration of the loop reads what another writes.
// SHARED: one function for all its calls.
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define SHARED __attribute__((noinline))
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#define SHARED __attribute__((noinline, noclone))
#else
#define INDEPENDENT
#define SHARED
#endif
)source";

// NVRTC has no headers: what expressions say of <cmath> and <cstdint>.
constexpr const char* kCudaPrelude = R"source(typedef int int32_t;
typedef long long int64_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define INT64_C(number) number##LL
#define INT64_MIN (-9223372036854775807LL - 1)
#define INT32_MIN (-2147483647 - 1)
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

namespace std {
inline float fabs(float x) { return ::fabsf(x); }
inline double fabs(double x) { return ::fabs(x); }
inline float sqrt(float x) { return ::sqrtf(x); }
inline double sqrt(double x) { return ::sqrt(x); }
inline float floor(float x) { return ::floorf(x); }
inline double floor(double x) { return ::floor(x); }
inline float ceil(float x) { return ::ceilf(x); }
inline double ceil(double x) { return ::ceil(x); }
inline float trunc(float x) { return ::truncf(x); }
inline double trunc(double x) { return ::trunc(x); }
inline float nearbyint(float x) { return ::nearbyintf(x); }
inline double nearbyint(double x) { return ::nearbyint(x); }
}  // namespace std

// As many elements as one access moves.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T at[kCount];
};
)source";

bool is_identifier_character(char character) {
  return std::isalnum(static_cast<unsigned char>(character)) != 0 || character == '_';
}

bool mentions(const std::string& text, const std::string& word) {
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !is_identifier_character(text[at - 1])) &&
        (end == text.size() || !is_identifier_character(text[end])))
      return true;
  }
  return false;
}

bool mentions_one(const std::string& text, const char* words) {
  std::istringstream stream(words);
  for (std::string word; stream >> word;) {
    if (mentions(text, word)) return true;
  }
  return false;
}

}  // namespace

std::string prelude_for(const std::string& kernels, c10::DeviceType device) {
  const bool is_host = device == c10::DeviceType::CPU;
  std::vector<const char*> chosen;
  std::string users = kernels;
  // A piece may use those before it.
  const auto& pieces = math_pieces(device);
  for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
    if (!mentions_one(users, piece->words)) continue;
    chosen.push_back(piece->text);
    users += piece->text;
  }
  std::string prelude = is_host ? kHostPrelude : kCudaPrelude;
  if (chosen.empty()) return prelude;
  prelude += "\nnamespace {\n";
  for (auto piece = chosen.rbegin(); piece != chosen.rend(); ++piece) prelude += *piece;
  return prelude + "\n}  // namespace\n";
}

}  // namespace tessera::compiler
