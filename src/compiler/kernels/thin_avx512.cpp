// Compiled for AVX-512 where the compiler can; chosen at run time in thin_products.cpp.
#include "compiler/kernels/thin_kernels.h"

namespace tessera::compiler {

ThinTable thin_table_avx512() { return thin_table(); }

}  // namespace tessera::compiler
