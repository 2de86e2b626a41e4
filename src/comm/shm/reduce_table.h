#pragma once

// Which kernel serves which dtype and operation; internal to the includer as the kernels are.

#include "comm/shm/reduce_kernels.h"

#include <utility>

namespace tessera::comm::shm {
namespace {

constexpr size_t kReductions = static_cast<size_t>(Reduction::Count);
constexpr size_t kElements = static_cast<size_t>(Element::Count);

template <class T>
constexpr bool kIsComplex = false;
template <class T>
constexpr bool kIsComplex<std::complex<T>> = true;
template <class T>
constexpr bool kHasBits = std::is_integral_v<T> || std::is_same_v<T, Boolean>;

/// Whether the operation, applied to values of type T, gives another one.
template <class T, Reduction op>
constexpr bool kHasMeaning = true;
template <class T>
constexpr bool kHasMeaning<T, Reduction::Avg> = !kHasBits<T>;
template <class T>
constexpr bool kHasMeaning<T, Reduction::Min> = !kIsComplex<T>;
template <class T>
constexpr bool kHasMeaning<T, Reduction::Max> = !kIsComplex<T>;
template <class T>
constexpr bool kHasMeaning<T, Reduction::And> = kHasBits<T>;
template <class T>
constexpr bool kHasMeaning<T, Reduction::Or> = kHasBits<T>;
template <class T>
constexpr bool kHasMeaning<T, Reduction::Xor> = kHasBits<T>;

/// Of truth values a sum or maximum is "any", a product or minimum "all". A real sum would wrap.
template <class T>
constexpr Reduction meaning_of(Reduction op) {
  if (!std::is_same_v<T, Boolean>) return op;
  if (op == Reduction::Sum || op == Reduction::Max) return Reduction::Or;
  if (op == Reduction::Product || op == Reduction::Min) return Reduction::And;
  return op;
}

template <class T, Reduction op>
constexpr Reduce kernel_of() {
  if constexpr (kHasMeaning<T, op>)
    return reduce_many<T, meaning_of<T>(op)>;
  else
    return nullptr;
}

// Arrays of the language: an inline function of std::array, compiled here for a newer instruction
// set, could be the one that the linker keeps for everybody.
struct Row {
  Element element;
  Reduce kernels[kReductions];
};
template <class T, size_t... op>
constexpr Row row_of(Element element, std::index_sequence<op...> /*operations*/) {
  return {element, {kernel_of<T, static_cast<Reduction>(op)>()...}};
}
template <class T>
constexpr Row row_of(Element element) {
  return row_of<T>(element, std::make_index_sequence<kReductions>());
}

constexpr Row kTable[] = {
    row_of<double>(Element::Float64),
    row_of<float>(Element::Float32),
    row_of<Half>(Element::Float16),
    row_of<BrainFloat>(Element::BFloat16),
    row_of<int8_t>(Element::Int8),
    row_of<int16_t>(Element::Int16),
    row_of<int32_t>(Element::Int32),
    row_of<int64_t>(Element::Int64),
    row_of<uint8_t>(Element::UInt8),
    row_of<uint16_t>(Element::UInt16),
    row_of<uint32_t>(Element::UInt32),
    row_of<uint64_t>(Element::UInt64),
    row_of<Boolean>(Element::Bool),
    row_of<std::complex<float>>(Element::Complex64),
    row_of<std::complex<double>>(Element::Complex128),
};

constexpr bool is_in_order() {
  for (size_t i = 0; i < kElements; ++i) {
    if (static_cast<size_t>(kTable[i].element) != i) return false;
  }
  return sizeof(kTable) == kElements * sizeof(Row);
}
static_assert(is_in_order(), "the table is indexed by Element");

Reduce find_kernel(Element element, Reduction op) {
  if (element >= Element::Count || op >= Reduction::Count) return nullptr;
  return kTable[static_cast<size_t>(element)].kernels[static_cast<size_t>(op)];
}

}  // namespace
}  // namespace tessera::comm::shm
