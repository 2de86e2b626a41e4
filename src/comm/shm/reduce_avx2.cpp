// Compiled with -mavx2 -mf16c where the compiler can; chosen at run time in reduce_baseline.cpp.
#include "comm/shm/reduce_table.h"

namespace tessera::comm::shm {

Reduce find_reduce_avx2(Element element, Reduction op) { return find_kernel(element, op); }

}  // namespace tessera::comm::shm
