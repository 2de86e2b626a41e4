// Compiled with -mavx2 -mf16c where the compiler can; chosen at run time in reduce_baseline.cpp.
#define TESSERA_REDUCE_TABLE find_reduce_avx2
#include "comm/shm/reduce_table.h"
