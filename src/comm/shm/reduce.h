#pragma once

#include <cstddef>
#include <cstdint>

/// Element-wise reduction of several buffers into one. Free of libtorch, so that it can be compiled
/// for several instruction sets without their inline functions leaking into each other.
namespace tessera::comm::shm {

enum class Element : uint8_t {
  Float64,
  Float32,
  Float16,
  BFloat16,
  Int8,
  Int16,
  Int32,
  Int64,
  UInt8,
  UInt16,
  UInt32,
  UInt64,
  Bool,
  Complex64,
  Complex128,
  Count
};
enum class Reduction : uint8_t { Sum, Avg, Product, Min, Max, And, Or, Xor, Count };

/// out[i] = inputs[0][i] op inputs[1][i] op ... in this order, whoever calls it: the same bits on
/// every rank. Half types are accumulated in float32 and rounded once. `out` may be one of the
/// inputs.
using Reduce = void (*)(void* out, const void* const* inputs, int input_count,
                        size_t element_count);

/// Null if the combination has no meaning (bitwise on floating point, order of complex numbers,
/// average of integers).
Reduce find_reduce(Element element, Reduction reduction);
/// The same for one instruction set, whether the machine has it or not.
Reduce find_reduce_baseline(Element element, Reduction reduction);
Reduce find_reduce_avx2(Element element, Reduction reduction);

}  // namespace tessera::comm::shm
