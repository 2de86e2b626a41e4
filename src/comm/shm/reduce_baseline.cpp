#include "comm/shm/reduce_table.h"

namespace tessera::comm::shm {

namespace {

bool has_avx2() {
#if defined(__x86_64__)
  static const bool kHas = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return kHas;
#else
  return false;
#endif
}

}  // namespace

Reduce find_reduce_baseline(Element element, Reduction op) { return find_kernel(element, op); }

Reduce find_reduce(Element element, Reduction op) {
  return has_avx2() ? find_reduce_avx2(element, op) : find_reduce_baseline(element, op);
}

}  // namespace tessera::comm::shm
