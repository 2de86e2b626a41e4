#define TESSERA_REDUCE_TABLE find_reduce_baseline
#include "comm/shm/reduce_kernels.inc"

namespace tessera::comm::shm {

Reduce find_reduce_avx2(Element element, Reduction op);

Reduce find_reduce(Element element, Reduction op) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (has_avx2) return find_reduce_avx2(element, op);
#endif
  return find_reduce_baseline(element, op);
}

}  // namespace tessera::comm::shm
