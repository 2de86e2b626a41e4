#include "dtensor/call.h"

#include "base/capture.h"

#include <ATen/WrapDimUtils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

namespace tessera::dtensor {
namespace {

Operand describe(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(),
          has_part(tensor) ? part_of(tensor).spec : SpecPtr(), number_in(tensor)};
}

template <class T>
Number kind_of(T value) {
  if (!std::isfinite(value)) return Number::NotFinite;
  return value == 0 ? Number::Zero : Number::Finite;
}

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  if (type.kind() == c10::TypeKind::OptionalType || type.kind() == c10::TypeKind::ListType)
    return holds_tensors(*type.containedType(0));
  return false;
}

bool is_list(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::OptionalType) return is_list(*type.containedType(0));
  return type.kind() == c10::TypeKind::ListType;
}

}  // namespace

Number number_in(const at::Tensor& tensor) {
  if (has_part(tensor) || tensor.numel() != 1 || !tensor.device().is_cpu()) return Number::Unknown;
  if (!tensor.has_storage() || !tensor.unsafeGetTensorImpl()->storage_initialized())
    return Number::Unknown;
  // A program that is recorded serves for other values too; a number in the source stays what it
  // is.
  if (capture::observer() != nullptr && !tensor.unsafeGetTensorImpl()->is_wrapped_number())
    return Number::Unknown;
  const void* const value = tensor.const_data_ptr();
  if (value == nullptr) return Number::Unknown;
  switch (tensor.scalar_type()) {
    case c10::kDouble:
      return kind_of(*static_cast<const double*>(value));
    case c10::kFloat:
      return kind_of(*static_cast<const float*>(value));
    case c10::kLong:
      return kind_of(static_cast<double>(*static_cast<const int64_t*>(value)));
    default:
      return Number::Unknown;
  }
}

Number number_in(const c10::Scalar& value) {
  if (value.isComplex()) {
    const auto number = value.toComplexDouble();
    const auto real = kind_of(number.real());
    const auto imaginary = kind_of(number.imag());
    if (real == Number::NotFinite || imaginary == Number::NotFinite) return Number::NotFinite;
    return real == Number::Zero ? imaginary : real;
  }
  return kind_of(value.toDouble());
}

Call::Call(const c10::FunctionSchema& schema, torch::jit::Stack arguments)
    : schema_(schema), arguments_(std::move(arguments)) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& formal = schema.arguments()[i];
    if (!holds_tensors(*formal.type())) continue;
    TensorArgument input{i, {}, {}, is_list(*formal.type())};
    input.is_written = formal.alias_info() != nullptr && formal.alias_info()->isWrite();
    const auto add = [&](const c10::IValue& value, size_t position) {
      if (!value.isTensor() || !value.toTensor().defined()) return;
      input.operands.push_back(describe(value.toTensor()));
      input.positions.push_back(position);
    };
    if (const auto& value = arguments_[i]; value.isList()) {
      for (size_t j = 0; j < value.toListRef().size(); ++j) add(value.toListRef()[j], j);
    } else {
      add(value, 0);
    }
    (formal.is_out() ? destinations_ : inputs_).push_back(std::move(input));
  }
}

bool Call::has_argument(std::string_view name) const {
  return std::any_of(schema_.arguments().begin(), schema_.arguments().end(),
                     [&](const auto& formal) { return formal.name() == name; });
}

size_t Call::index_of(std::string_view name) const {
  const auto& formals = schema_.arguments();
  const auto found = std::find_if(formals.begin(), formals.end(),
                                  [&](const auto& formal) { return formal.name() == name; });
  TORCH_INTERNAL_ASSERT(found != formals.end(), schema_, " has no argument ", name);
  return static_cast<size_t>(found - formals.begin());
}

const c10::IValue& Call::argument(std::string_view name) const {
  return arguments_[index_of(name)];
}

int64_t Call::dim(std::string_view name, int64_t ndim) const {
  return at::maybe_wrap_dim(argument(name).toInt(), ndim);
}

std::vector<int64_t> Call::dims(std::string_view name, int64_t ndim) const {
  std::vector<int64_t> dims;
  if (has_argument(name) && !argument(name).isNone()) {
    const auto& value = argument(name);
    dims = value.isInt() ? std::vector<int64_t>{value.toInt()} : value.toIntVector();
  }
  if (dims.empty()) {
    dims.resize(ndim);
    std::iota(dims.begin(), dims.end(), 0);
  }
  for (auto& dim : dims) dim = at::maybe_wrap_dim(dim, ndim);
  return dims;
}

std::vector<Placement> Call::row(const Placement& outputs) const {
  std::vector<Placement> row(output_count() + input_count());
  std::fill_n(row.begin(), output_count(), outputs);
  return row;
}

namespace {

/// Tells values of different kinds apart.
enum Tag : uint64_t {
  kNone = 1,
  kPlain,
  kDistributed,
  kInt,
  kBool,
  kDouble,
  kComplex,
  kText,
  kDevice,
  kList,
  kGenerator
};

}  // namespace

void CallKey::add_tensor(const at::Tensor& tensor) {
  const bool is_part = has_part(tensor);
  const auto sizes = tensor.sizes();
  words_.push_back((is_part ? kDistributed : kPlain) |
                   static_cast<uint64_t>(tensor.scalar_type()) << 8 |
                   static_cast<uint64_t>(sizes.size()) << 16);
  if (is_part) words_.push_back(part_of(tensor).spec->id);
  for (const auto size : sizes) words_.push_back(static_cast<uint64_t>(size));
  if (!is_part) {
    words_.push_back(static_cast<uint64_t>(number_in(tensor)));
    has_plain_ = has_plain_ || tensor.numel() != 1 || tensor.requires_grad();
    return;
  }
  for (const auto stride : tensor.strides()) words_.push_back(static_cast<uint64_t>(stride));
}

void CallKey::add_text(const std::string& text) {
  words_.push_back(kText | static_cast<uint64_t>(text.size()) << 8);
  for (size_t begin = 0; begin < text.size(); begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + begin, std::min(sizeof word, text.size() - begin));
    words_.push_back(word);
  }
}

void CallKey::add(const c10::IValue& value) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) return add_tensor(value.toTensor());
    words_.push_back(kNone);
  } else if (value.isNone()) {
    words_.push_back(kNone);
  } else if (value.isInt()) {
    words_.insert(words_.end(), {kInt, static_cast<uint64_t>(value.toInt())});
  } else if (value.isBool()) {
    words_.push_back(kBool | static_cast<uint64_t>(value.toBool()) << 8);
  } else if (value.isDouble()) {
    words_.insert(words_.end(), {kDouble, std::bit_cast<uint64_t>(value.toDouble())});
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    words_.insert(words_.end(), {kComplex, std::bit_cast<uint64_t>(number.real()),
                                 std::bit_cast<uint64_t>(number.imag())});
  } else if (value.isString()) {
    add_text(value.toStringRef());
  } else if (value.isDevice()) {
    const auto device = value.toDevice();
    words_.push_back(kDevice | static_cast<uint64_t>(device.type()) << 8 |
                     static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 24);
  } else if (value.isList()) {
    const auto elements = value.toListRef();
    words_.push_back(kList | static_cast<uint64_t>(elements.size()) << 8);
    for (const auto& element : elements) add(element);
  } else if (value.isGenerator()) {
    words_.push_back(kGenerator);  // which one decides over values only
  } else {
    is_complete_ = false;
  }
}

size_t CallKey::hash() const {
  uint64_t hash = 0x9e3779b97f4a7c15ULL;
  for (const auto word : words_) {
    hash = (hash ^ word) * 0xff51afd7ed558ccdULL;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace tessera::dtensor
