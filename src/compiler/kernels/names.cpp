#include "compiler/kernels/names.h"

#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace tessera::compiler {
namespace {

// Words of the language, and those of generated sources themselves.
constexpr const char* kReservedWords =
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t "
    "char32_t class compl const const_cast constexpr continue decltype default delete do "
    "double dynamic_cast else enum explicit export extern false float for friend goto if "
    "inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq "
    "private protected public register reinterpret_cast return short signed sizeof static "
    "static_assert static_cast struct switch template this thread_local throw true try "
    "typedef typeid typename union unsigned using virtual void volatile wchar_t while xor "
    "xor_eq Host Pack at begin bfloat16 float16 count end host int32_t int64_t linux math scalars "
    "std step tensors "
    "uint16_t uint32_t uint64_t unix "
    // Macros of headers; see looks_like_macro() for others.
    "errno math_errhandling stderr stdin stdout ";

/// NULL, INT64_MIN, M_PI, M_PIf64x, _GNU_SOURCE and the macros of generated sources.
bool looks_like_macro(const std::string& name) {
  const auto is_capital = [](unsigned char character) { return std::isupper(character) != 0; };
  if (name.starts_with("M_") || (name.size() > 1 && name[0] == '_' && is_capital(name[1])))
    return true;
  return name.size() > 1 && std::any_of(name.begin(), name.end(), is_capital) &&
         std::none_of(name.begin(), name.end(),
                      [](unsigned char character) { return std::islower(character) != 0; });
}

bool is_reserved(const std::string& name) {
  static const auto& words = *[] {
    std::istringstream stream(kReservedWords);
    using Words = std::istream_iterator<std::string>;
    return new std::unordered_set<std::string>(Words(stream), Words());
  }();
  return words.count(name) != 0;
}

/// Hands out names, each once.
class UniqueNames {
 public:
  std::string take(const std::string& wanted) {
    const bool is_taken = is_reserved(wanted) || looks_like_macro(wanted) ||
                          wanted.starts_with(kernel_prefix(c10::DeviceType::CPU)) ||
                          wanted.starts_with(kernel_prefix(c10::DeviceType::CUDA));
    const std::string base = is_taken ? wanted + "_" : wanted;
    std::string name = base;
    for (int& number = next_[base]; !names_.insert(name).second;)
      name = base + "_" + std::to_string(++number);
    return name;
  }

 private:
  std::unordered_set<std::string> names_;
  std::unordered_map<std::string, int> next_;
};

std::string list_text(const std::vector<ValueId>& values, const std::vector<std::string>& names) {
  std::string text;
  for (const ValueId value : values) {
    text += (text.empty() ? "" : ", ") +
            (value == kNoValue ? "None" : names.at(static_cast<size_t>(value)));
  }
  return text;
}

std::string argument_text(const Argument& argument, const c10::Argument* declared,
                          const std::vector<std::string>& names) {
  switch (argument.kind) {
    case Argument::Kind::Value:
      return list_text(argument.values, names);
    case Argument::Kind::List:
      return c10::str("[", list_text(argument.values, names), "]");
    case Argument::Kind::Constant:
      break;
  }
  const c10::Type& type = declared == nullptr ? *c10::AnyType::get() : *declared->real_type();
  return text_of_constant(argument.constant, type);
}

bool is_default(const Argument& argument, const c10::Argument* declared) {
  if (argument.kind != Argument::Kind::Constant || declared == nullptr) return false;
  if (!declared->default_value()) return false;
  const auto& type = *declared->real_type();
  return text_of_constant(argument.constant, type) ==
         text_of_constant(*declared->default_value(), type);
}

}  // namespace

const char* kernel_prefix(c10::DeviceType device) {
  return device == c10::DeviceType::CPU ? "cpp_fused_" : "cuda_fused_";
}

std::string python_name(const std::string& op) {
  const auto colons = op.find("::");
  if (colons == std::string::npos) return op;
  const std::string library = op.substr(0, colons);
  std::string name = op.substr(colons + 2);
  if (name.find('.') == std::string::npos) name += ".default";
  return (library == "aten" ? "aten." : "torch.ops." + library + ".") + name;
}

std::string short_name(const std::string& op) {
  const auto colons = op.find("::");
  std::string name = op.substr(colons == std::string::npos ? 0 : colons + 2);
  name.resize(std::min(name.find('.'), name.size()));
  constexpr std::string_view kList = "_foreach_";
  if (name.starts_with(kList)) name.erase(0, kList.size());
  while (name.size() > 1 && name.front() == '_') name.erase(0, 1);
  return identifier(name);
}

std::string identifier(const std::string& text) {
  std::string name;
  for (const unsigned char character : text) {
    const bool plain = character < 128 && (std::isalnum(character) != 0 || character == '_');
    // Two underscores in a row are the language's own.
    if (plain && !(character == '_' && name.ends_with('_'))) name += static_cast<char>(character);
    if (!plain && !name.empty() && name.back() != '_') name += '_';
  }
  while (name.size() > 1 && name.back() == '_' && !text.ends_with('_')) name.pop_back();
  if (name.empty() || std::isdigit(static_cast<unsigned char>(name[0])) != 0) return "v" + name;
  return name;
}

std::vector<std::string> name_values(const Graph& graph) {
  std::vector<std::string> names(graph.value_count());
  UniqueNames taken;
  for (const GraphInput& input : graph.inputs)
    names.at(static_cast<size_t>(input.value)) = taken.take(identifier(input.name));
  for (const Node& node : graph.nodes) {
    const auto defined = node.defined();
    std::vector<std::string> wanted(defined.size(), short_name(node.op));
    if (node.body) {
      // A fused result is called as the operator that gives it.
      for (size_t i = 0; i < node.body->outputs.size() && i < wanted.size(); ++i) {
        for (const Node& inner : node.body->nodes) {
          const auto values = inner.defined();
          const ValueId output = node.body->outputs[i].value;
          if (std::find(values.begin(), values.end(), output) != values.end())
            wanted[i] = short_name(inner.op);
        }
      }
    }
    for (size_t i = 0; i < defined.size(); ++i)
      names.at(static_cast<size_t>(defined[i])) = taken.take(wanted[i]);
  }
  return names;
}

std::string call_text(const Node& node, const std::vector<std::string>& names) {
  const auto op = find_operator(node.op);
  std::string text;
  bool skipped = false;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    const c10::Argument* declared =
        op && i < op->schema().arguments().size() ? &op->schema().arguments()[i] : nullptr;
    if (is_default(node.arguments[i], declared)) {
      skipped = true;
      continue;
    }
    if (!text.empty()) text += ", ";
    if (declared != nullptr && (skipped || declared->kwarg_only())) text += declared->name() + "=";
    text += argument_text(node.arguments[i], declared, names);
  }
  return python_name(node.op) + "(" + text + ")";
}

}  // namespace tessera::compiler
