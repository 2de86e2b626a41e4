#include "compiler/kernels/prelude.h"

#include "compiler/kernels/prelude_math.h"

#include <cctype>
#include <sstream>
#include <vector>

namespace tessera::compiler {
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
