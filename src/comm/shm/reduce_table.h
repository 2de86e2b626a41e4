#pragma once

// Which kernel serves which dtype and operation; internal to the includer as the kernels are.

#include "comm/shm/reduce_kernels.h"

namespace tessera::comm::shm {
namespace {

template <class T>
Reduce find_floating(Reduction op) {
  switch (op) {
    case Reduction::Sum:
      return reduce_many<T, Reduction::Sum>;
    case Reduction::Avg:
      return reduce_many<T, Reduction::Avg>;
    case Reduction::Product:
      return reduce_many<T, Reduction::Product>;
    case Reduction::Min:
      return reduce_many<T, Reduction::Min>;
    case Reduction::Max:
      return reduce_many<T, Reduction::Max>;
    default:
      return nullptr;
  }
}
template <class T>
Reduce find_integral(Reduction op) {
  switch (op) {
    case Reduction::Sum:
      return reduce_many<T, Reduction::Sum>;
    case Reduction::Product:
      return reduce_many<T, Reduction::Product>;
    case Reduction::Min:
      return reduce_many<T, Reduction::Min>;
    case Reduction::Max:
      return reduce_many<T, Reduction::Max>;
    case Reduction::And:
      return reduce_many<T, Reduction::And>;
    case Reduction::Or:
      return reduce_many<T, Reduction::Or>;
    case Reduction::Xor:
      return reduce_many<T, Reduction::Xor>;
    default:
      return nullptr;
  }
}
template <class T>
Reduce find_complex(Reduction op) {
  switch (op) {
    case Reduction::Sum:
      return reduce_many<T, Reduction::Sum>;
    case Reduction::Avg:
      return reduce_many<T, Reduction::Avg>;
    case Reduction::Product:
      return reduce_many<T, Reduction::Product>;
    default:
      return nullptr;
  }
}
// Of truth values a sum or maximum is "any", a product or minimum "all".
Reduce find_boolean(Reduction op) {
  switch (op) {
    case Reduction::Sum:
    case Reduction::Max:
    case Reduction::Or:
      return reduce_many<Boolean, Reduction::Or>;
    case Reduction::Product:
    case Reduction::Min:
    case Reduction::And:
      return reduce_many<Boolean, Reduction::And>;
    case Reduction::Xor:
      return reduce_many<Boolean, Reduction::Xor>;
    default:
      return nullptr;
  }
}

Reduce find_kernel(Element element, Reduction op) {
  switch (element) {
    case Element::Float64:
      return find_floating<double>(op);
    case Element::Float32:
      return find_floating<float>(op);
    case Element::Float16:
      return find_floating<Half>(op);
    case Element::BFloat16:
      return find_floating<BrainFloat>(op);
    case Element::Int8:
      return find_integral<int8_t>(op);
    case Element::Int16:
      return find_integral<int16_t>(op);
    case Element::Int32:
      return find_integral<int32_t>(op);
    case Element::Int64:
      return find_integral<int64_t>(op);
    case Element::UInt8:
      return find_integral<uint8_t>(op);
    case Element::UInt16:
      return find_integral<uint16_t>(op);
    case Element::UInt32:
      return find_integral<uint32_t>(op);
    case Element::UInt64:
      return find_integral<uint64_t>(op);
    case Element::Bool:
      return find_boolean(op);
    case Element::Complex64:
      return find_complex<std::complex<float>>(op);
    case Element::Complex128:
      return find_complex<std::complex<double>>(op);
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace tessera::comm::shm
