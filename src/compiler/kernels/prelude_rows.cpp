#include "compiler/kernels/prelude_math.h"

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

}  // namespace tessera::compiler
