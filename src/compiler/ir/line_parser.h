#pragma once

#include <tessera/compile/graph.h>

#include <ATen/core/function_schema.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tessera::compiler {

/// Reads one line of a graph's text from left to right. Every member that finds something else than
/// expected throws a ValueError naming the line.
class Cursor {
 public:
  Cursor(std::string_view line, int64_t number) : rest_(line), number_(number) {}

  /// Takes `token` if it comes next, after spaces.
  bool accept(std::string_view token);
  void expect(std::string_view token);
  bool at_end();
  void expect_end();
  char peek();  // the next character after spaces, '\0' at the end

  /// Letters, digits, '_', '.' and ':' as in "aten::add.Tensor".
  std::string_view word(const char* expected);
  /// What comes up to one of these characters, or the end.
  std::string_view until(std::string_view stops);
  std::string quoted();
  int64_t integer(const char* expected);
  double real(const char* expected);

  [[noreturn]] void fail(const std::string& expected);

 private:
  void skip_spaces();

  std::string_view rest_;
  int64_t number_;
};

/// What Graph::parse knows while it reads a node: the values that may be used.
struct DefinedValues {
  std::function<bool(ValueId)> is_defined;
};

/// An argument in text and whether its values are marked as consumed.
struct ParsedArgument {
  Argument argument;
  bool marked = false;
};

/// `declared` decides what names and empty lists mean; null: of a fused node, which has no schema.
ParsedArgument parse_argument(Cursor& cursor, const c10::Argument* declared,
                              const DefinedValues& known);
/// "%3", "_"; must be defined.
ValueId parse_use(Cursor& cursor, const DefinedValues& known);
/// "%3" without further checks.
ValueId parse_value_number(Cursor& cursor);

}  // namespace tessera::compiler
