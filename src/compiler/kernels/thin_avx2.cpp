// Compiled for AVX2 and FMA where the compiler can; chosen at run time in thin_products.cpp.
#include "compiler/kernels/thin_kernels.h"

namespace tessera::compiler {

ThinTable thin_table_avx2() { return thin_table(); }

}  // namespace tessera::compiler
