#include "compiler/ir/constants.h"

#include "compiler/ir/text.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include <array>
#include <charconv>
#include <deque>
#include <sstream>
#include <string>
#include <vector>

namespace tessera::compiler {
namespace {

struct Name {
  std::string_view name;
  int64_t number;
};

template <class Enum>
constexpr Name entry(std::string_view name, Enum value) {
  return {name, static_cast<int64_t>(value)};
}

constexpr std::array kLayouts = {
    entry("strided", c10::Layout::Strided),      entry("sparse_coo", c10::Layout::Sparse),
    entry("sparse_csr", c10::Layout::SparseCsr), entry("sparse_csc", c10::Layout::SparseCsc),
    entry("sparse_bsr", c10::Layout::SparseBsr), entry("sparse_bsc", c10::Layout::SparseBsc),
    entry("jagged", c10::Layout::Jagged),        entry("mkldnn", c10::Layout::Mkldnn),
};
constexpr std::array kMemoryFormats = {
    entry("contiguous_format", c10::MemoryFormat::Contiguous),
    entry("preserve_format", c10::MemoryFormat::Preserve),
    entry("channels_last", c10::MemoryFormat::ChannelsLast),
    entry("channels_last_3d", c10::MemoryFormat::ChannelsLast3d),
};

std::vector<Name> dtype_names() {
  // Some versions of libtorch give the names as strings of the caller's.
  static std::deque<std::string> kept;
  std::vector<Name> names;
  for (int64_t i = 0; i < static_cast<int64_t>(c10::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<c10::ScalarType>(i);
    if (dtype == c10::ScalarType::Undefined) continue;
    // Quantized types have no element type of their own and no name in Python's sense.
    if (c10::isQIntType(dtype)) continue;
    kept.emplace_back(c10::getDtypeNames(dtype).first);
    names.push_back({kept.back(), i});
  }
  return names;
}

c10::ArrayRef<Name> names_for(const c10::Type& type) {
  static const std::vector<Name> kDtypes = dtype_names();
  switch (type.kind()) {
    case c10::TypeKind::ScalarTypeType:
      return kDtypes;
    case c10::TypeKind::LayoutType:
      return kLayouts;
    case c10::TypeKind::MemoryFormatType:
      return kMemoryFormats;
    default:
      return {};
  }
}

/// Shortest digits that read back as the same number; never like those of an integer.
std::string text_of_double(double number) {
  std::array<char, 40> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  std::string text(digits.data(), end);
  return text.find_first_of(".einf") == std::string::npos ? text + ".0" : text;
}

std::string text_of_tensor(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.defined() && tensor.dim() == 0 && tensor.is_cpu(),
      "Graph::str: expected constant tensors to be numbers (0-dim, on the CPU), got ",
      tensor.defined() ? c10::str(tensor.sizes(), " on ", tensor.device()) : "an undefined one",
      "; make it an input of the graph");
  const auto number = text_of_constant(c10::IValue(tensor.item()), *c10::NumberType::get());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return "number(" + number + ")";
  return "tensor(" + number + ", " + std::string(c10::getDtypeNames(tensor.scalar_type()).first) +
         ")";
}

std::string text_of_list(const c10::IValue& list, const c10::Type& type) {
  const auto* declared = type.castRaw<c10::ListType>();
  const c10::Type& element =
      declared == nullptr ? *c10::AnyType::get() : *declared->getElementType();
  std::string text;
  for (const c10::IValue& each : list.toListRef())
    text += (text.empty() ? "" : ", ") + text_of_constant(each, element);
  return "[" + text + "]";
}

}  // namespace

std::string_view name_of_number(int64_t number, const c10::Type& type) {
  for (const Name& each : names_for(type)) {
    if (each.number == number) return each.name;
  }
  return {};
}

std::optional<int64_t> number_of_name(std::string_view name, const c10::Type& type) {
  for (const Name& each : names_for(type)) {
    if (each.name == name) return each.number;
  }
  return std::nullopt;
}

std::optional<at::ScalarType> dtype_of_name(std::string_view name) {
  const auto number = number_of_name(name, *c10::ScalarTypeType::get());
  if (!number) return std::nullopt;
  return static_cast<at::ScalarType>(*number);
}

c10::TypePtr required(const c10::TypePtr& type) {
  const auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

at::Tensor number_tensor(const at::Scalar& number) {
  auto tensor = at::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

std::string text_of_constant(const c10::IValue& constant, const c10::Type& declared) {
  const auto* optional = declared.castRaw<c10::OptionalType>();
  const c10::Type& type = optional == nullptr ? declared : *optional->getElementType();
  if (constant.isNone()) return "None";
  if (constant.isBool()) return constant.toBool() ? "True" : "False";
  if (constant.isInt()) {
    const auto name = name_of_number(constant.toInt(), type);
    return name.empty() ? std::to_string(constant.toInt()) : std::string(name);
  }
  if (constant.isDouble()) return text_of_double(constant.toDouble());
  if (constant.isComplexDouble()) {
    const auto number = constant.toComplexDouble();
    return "complex(" + text_of_double(number.real()) + ", " + text_of_double(number.imag()) + ")";
  }
  if (constant.isString()) return quote(constant.toStringRef());
  if (constant.isDevice()) return "device(" + constant.toDevice().str() + ")";
  if (constant.isGenerator()) return "generator(" + constant.toGenerator().device().str() + ")";
  if (constant.isTensor()) return text_of_tensor(constant.toTensor());
  if (constant.isList()) return text_of_list(constant, type);
  TORCH_CHECK_VALUE(false, "Graph::str: a constant of type ", constant.tagKind(),
                    " has no text form");
}

std::string quote(std::string_view text) {
  std::string result = "\"";
  for (const char character : text) {
    const auto byte = static_cast<unsigned char>(character);
    if (character == '"' || character == '\\') {
      result += '\\';
      result += character;
    } else if (byte < 0x20 || byte == 0x7F) {
      constexpr std::string_view kDigits = "0123456789abcdef";
      result += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    } else {
      result += character;
    }
  }
  return result + "\"";
}

}  // namespace tessera::compiler
