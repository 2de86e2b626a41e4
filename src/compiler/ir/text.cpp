#include "compiler/ir/text.h"

#include "comm/dtype_names.h"
#include "compiler/ir/operators.h"

#include <algorithm>
#include <array>
#include <sstream>

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
