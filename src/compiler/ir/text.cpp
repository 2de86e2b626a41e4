#include "compiler/ir/text.h"

#include "comm/type_names.h"
#include "compiler/ir/operators.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include <algorithm>
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

namespace tessera {
namespace compiler {
namespace {

template <class Items, class Print>
std::string joined(const Items& items, const Print& print) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ", ") + print(item);
  return text;
}

std::string bracketed(const std::string& text) { return std::string("[").append(text).append("]"); }

std::string numbers(const std::vector<int64_t>& values) {
  return bracketed(joined(values, [](int64_t value) { return std::to_string(value); }));
}

std::string value_name(ValueId value) {
  return value == kNoValue ? "_" : std::string("%").append(std::to_string(value));
}

/// Prints the lines of a graph, and of the bodies of its fused nodes with more indentation.
class Printer {
 public:
  explicit Printer(const Graph& graph, std::string indent = "")
      : graph_(graph), indent_(std::move(indent)) {}

  std::string graph() const {
    std::string text;
    for (const GraphInput& input : graph_.inputs) {
      text += line("input " + definition(input.value) + " = " + std::string(name_of(input.kind)) +
                   " " + quote(input.name));
    }
    for (const Node& each : graph_.nodes) text += line(node(each));
    for (const GraphOutput& output : graph_.outputs) text += line(this->output(output));
    return text;
  }

  std::string node(const Node& node) const {
    std::string text;
    if (!node.results.empty())
      text = joined(node.results, [this](const auto& each) { return result(each); }) + " = ";
    text += node.op + "(" + arguments(node) + ")";
    if (node.body) text += " {";
    if (!node.module.empty()) text += "  # " + module_path(node.module);
    if (node.body) text += "\n" + Printer(*node.body, indent_ + "  ").graph() + indent_ + "}";
    return text;
  }

 private:
  std::string line(const std::string& text) const { return indent_ + text + "\n"; }

  std::string definition(ValueId value) const {
    if (value == kNoValue) return "_";
    return value_name(value) + ": " + text_of(graph_.type(value));
  }

  std::string result(const Argument& result) const {
    const auto text = joined(result.values, [this](ValueId value) { return definition(value); });
    return result.kind == Argument::Kind::List ? bracketed(text) : text;
  }

  static std::string output(const GraphOutput& output) {
    switch (output.kind) {
      case OutputKind::Result:
        return "return " + value_name(output.value);
      case OutputKind::Write:
        return "write " + value_name(output.value) + " to " + value_name(output.target);
      case OutputKind::Gradient:
        break;
    }
    return "gradient " + value_name(output.value) + " of " + value_name(output.target);
  }

  /// What equals its default is left out; after that, and where the schema asks for it, names.
  static std::string arguments(const Node& node) {
    const auto op = find_operator(node.op);
    std::string text;
    bool skipped = false;
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      const Argument& value = node.arguments[i];
      const c10::Argument* declared =
          op && i < op->schema().arguments().size() ? &op->schema().arguments()[i] : nullptr;
      if (declared != nullptr && is_default(value, *declared)) {
        skipped = true;
        continue;
      }
      if (!text.empty()) text += ", ";
      if (declared != nullptr && (skipped || declared->kwarg_only()))
        text += declared->name() + "=";
      text += argument(node, i, declared);
    }
    return text;
  }

  static bool is_default(const Argument& argument, const c10::Argument& declared) {
    if (argument.kind != Argument::Kind::Constant || !declared.default_value()) return false;
    const auto& type = *declared.real_type();
    return text_of_constant(argument.constant, type) ==
           text_of_constant(*declared.default_value(), type);
  }

  static std::string argument(const Node& node, size_t index, const c10::Argument* declared) {
    const Argument& argument = node.arguments[index];
    const std::string mark = writes(node, index) ? "!" : "";
    switch (argument.kind) {
      case Argument::Kind::Value:
        return value_name(argument.values[0]) + mark;
      case Argument::Kind::List:
        return bracketed(
            joined(argument.values, [&](ValueId value) { return value_name(value) + mark; }));
      case Argument::Kind::Constant:
        break;
    }
    const c10::Type& type = declared == nullptr ? *c10::AnyType::get() : *declared->real_type();
    return text_of_constant(argument.constant, type);
  }

  static std::string module_path(const std::string& path) {
    const bool plain = std::all_of(path.begin(), path.end(), [](unsigned char character) {
      return std::isalnum(character) != 0 || character == '.' || character == '_' ||
             character == '-' || character == '/';
    });
    return plain ? path : quote(path);
  }

  const Graph& graph_;
  const std::string indent_;
};

constexpr std::array<std::string_view, 6> kInputKinds = {"parameter", "buffer",   "state",
                                                         "gradient",  "argument", "outside"};

}  // namespace

std::string_view name_of(InputKind kind) { return kInputKinds.at(static_cast<size_t>(kind)); }

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

std::string text_of(const ValueType& type) {
  std::ostringstream text;
  text << comm::name_of_dtype(type.dtype) << numbers(type.sizes);
  if (type.strides != contiguous_strides(type.sizes)) text << " strides=" << numbers(type.strides);
  if (type.device != at::kCPU) text << " device=" << type.device;
  if (type.placement) text << " placement=" << *type.placement;
  return text.str();
}

std::string text_of(const Graph& graph, const Node& node) { return Printer(graph).node(node); }

}  // namespace compiler

std::string Graph::str() const { return compiler::Printer(*this).graph(); }

}  // namespace tessera
