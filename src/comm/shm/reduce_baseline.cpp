#define TESSERA_REDUCE_TABLE find_reduce_baseline
#include "comm/shm/reduce_table.h"

namespace tessera::comm::shm {

Reduce find_reduce_avx2(Element element, Reduction op);

namespace {

bool has_avx2() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has;
#else
  return false;
#endif
}

}  // namespace

Reduce find_reduce(Element element, Reduction op) {
  return has_avx2() ? find_reduce_avx2(element, op) : find_reduce_baseline(element, op);
}

}  // namespace tessera::comm::shm
