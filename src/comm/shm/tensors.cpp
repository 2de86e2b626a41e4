#include "comm/shm/tensors.h"

#include "comm/type_names.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

namespace tessera::comm::shm {
namespace {

Element element_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kDouble:
      return Element::Float64;
    case c10::kFloat:
      return Element::Float32;
    case c10::kHalf:
      return Element::Float16;
    case c10::kBFloat16:
      return Element::BFloat16;
    case c10::kChar:
      return Element::Int8;
    case c10::kShort:
      return Element::Int16;
    case c10::kInt:
      return Element::Int32;
    case c10::kLong:
      return Element::Int64;
    case c10::kByte:
      return Element::UInt8;
    case c10::kUInt16:
      return Element::UInt16;
    case c10::kUInt32:
      return Element::UInt32;
    case c10::kUInt64:
      return Element::UInt64;
    case c10::kBool:
      return Element::Bool;
    case c10::kComplexFloat:
      return Element::Complex64;
    case c10::kComplexDouble:
      return Element::Complex128;
    default:
      return Element::Count;
  }
}

Reduction reduction_of(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return Reduction::Sum;
    case c10d::ReduceOp::AVG:
      return Reduction::Avg;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::Product;
    case c10d::ReduceOp::MIN:
      return Reduction::Min;
    case c10d::ReduceOp::MAX:
      return Reduction::Max;
    case c10d::ReduceOp::BAND:
      return Reduction::And;
    case c10d::ReduceOp::BOR:
      return Reduction::Or;
    case c10d::ReduceOp::BXOR:
      return Reduction::Xor;
    default:
      return Reduction::Count;
  }
}

constexpr c10d::ReduceOp::RedOpType kOps[] = {
    c10d::ReduceOp::SUM, c10d::ReduceOp::AVG,  c10d::ReduceOp::PRODUCT, c10d::ReduceOp::MIN,
    c10d::ReduceOp::MAX, c10d::ReduceOp::BAND, c10d::ReduceOp::BOR,     c10d::ReduceOp::BXOR};

std::string supported_ops(Element element) {
  std::string text;
  for (const auto op : kOps) {
    if (find_reduce(element, reduction_of(op)) == nullptr) continue;
    text += (text.empty() ? "" : ", ") + std::string(name_of_reduce(op));
  }
  return text.empty() ? "none; convert it first" : text;
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor empty_plain(const at::Tensor& like) { return at::empty(like.sizes(), like.options()); }

at::Tensor make_plain(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return is_plain(tensor) ? tensor.detach() : empty_plain(tensor).copy_(tensor);
}

Bytes bytes_of(const at::Tensor& contiguous) {
  return {.data = static_cast<uint8_t*>(contiguous.data_ptr()), .size = contiguous.nbytes()};
}

Combine find_combine(const char* caller, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto element = element_of(tensor.scalar_type());
  const auto kernel = find_reduce(element, reduction_of(op.op_));
  TORCH_CHECK_TYPE(kernel != nullptr, caller, ": ", name_of_reduce(op.op_), " of ",
                   name_of_dtype(tensor.scalar_type()),
                   " tensors has no meaning here; this dtype has: ", supported_ops(element));
  return {.kernel = kernel,
          .element_size = static_cast<size_t>(tensor.element_size()),
          .dtype = tensor.scalar_type(),
          .reduction = reduction_of(op.op_)};
}

}  // namespace tessera::comm::shm
