#include "compiler/ir/line_parser.h"

#include "compiler/ir/text.h"

#include <ATen/Context.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <optional>

namespace tessera::compiler {
namespace {

bool is_token_character(char character) {
  return std::isalnum(static_cast<unsigned char>(character)) != 0 || character == '_' ||
         character == '.' || character == ':';
}

std::optional<int> hex_digit(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  return std::nullopt;
}

}  // namespace

void Cursor::skip_spaces() {
  const auto begin = rest_.find_first_not_of(' ');
  rest_.remove_prefix(std::min(begin, rest_.size()));
}

bool Cursor::accept(std::string_view token) {
  skip_spaces();
  if (!rest_.starts_with(token)) return false;
  // A word ends where the token ends: "to" is not the beginning of "tomorrow".
  if (is_token_character(token.back()) && rest_.size() > token.size() &&
      is_token_character(rest_[token.size()]))
    return false;
  rest_.remove_prefix(token.size());
  return true;
}

void Cursor::expect(std::string_view token) {
  if (!accept(token)) fail("'" + std::string(token) + "'");
}

bool Cursor::at_end() {
  skip_spaces();
  return rest_.empty();
}

void Cursor::expect_end() {
  if (!at_end()) fail("the end of the line");
}

char Cursor::peek() {
  skip_spaces();
  return rest_.empty() ? '\0' : rest_.front();
}

std::string_view Cursor::word(const char* expected) {
  skip_spaces();
  const auto end = std::find_if_not(rest_.begin(), rest_.end(), is_token_character);
  const auto word = rest_.substr(0, static_cast<size_t>(end - rest_.begin()));
  if (word.empty()) fail(expected);
  rest_.remove_prefix(word.size());
  return word;
}

std::string_view Cursor::until(std::string_view stops) {
  skip_spaces();
  const auto text = rest_.substr(0, rest_.find_first_of(stops));
  rest_.remove_prefix(text.size());
  return text;
}

std::string Cursor::quoted() {
  expect("\"");
  std::string text;
  while (!rest_.empty() && rest_.front() != '"') {
    char character = rest_.front();
    rest_.remove_prefix(1);
    if (character == '\\') {
      if (rest_.empty()) fail("a character after '\\'");
      character = rest_.front();
      rest_.remove_prefix(1);
      if (character == 'x') {
        const auto high = rest_.size() < 2 ? std::nullopt : hex_digit(rest_[0]);
        const auto low = rest_.size() < 2 ? std::nullopt : hex_digit(rest_[1]);
        if (!high || !low) fail("two hexadecimal digits after '\\x'");
        character = static_cast<char>(*high * 16 + *low);
        rest_.remove_prefix(2);
      } else if (character != '"' && character != '\\') {
        fail("'\\\\', '\\\"' or '\\x..' in a string");
      }
    }
    text += character;
  }
  if (rest_.empty()) fail("'\"' at the end of a string");
  rest_.remove_prefix(1);
  return text;
}

int64_t Cursor::integer(const char* expected) {
  skip_spaces();
  int64_t value = 0;
  const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
  if (error != std::errc()) fail(expected);
  rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
  return value;
}

double Cursor::real(const char* expected) {
  skip_spaces();
  double value = 0;
  const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
  if (error != std::errc()) fail(expected);
  rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
  return value;
}

void Cursor::fail(const std::string& expected) {
  constexpr size_t kMost = 40;
  std::string got = rest_.empty() ? "the end of the line" : "'" + std::string(rest_) + "'";
  if (rest_.size() > kMost) got = "'" + std::string(rest_.substr(0, kMost)) + "...'";
  TORCH_CHECK_VALUE(false, "Graph::parse: line ", number_, ": expected ", expected, ", got ", got);
}

namespace {

c10::IValue parse_number(Cursor& cursor) {
  Cursor as_integer = cursor;
  const double real = cursor.real("a number, a name or a constant");
  if (std::isfinite(real)) {
    const std::string_view stops = " ,)]}";
    Cursor digits = as_integer;
    if (digits.until(stops).find_first_of(".e") == std::string_view::npos) {
      cursor = as_integer;
      return cursor.integer("an integer of 64 bits");
    }
  }
  return real;
}

c10::IValue parse_device(Cursor& cursor) {
  cursor.expect("(");
  const std::string text(cursor.until(")"));
  std::optional<c10::Device> device;
  try {
    device = c10::Device(text);
  } catch (const c10::Error&) {
    cursor.fail("a device instead of '" + text + "'");
  }
  cursor.expect(")");
  return *device;
}

c10::IValue parse_generator(Cursor& cursor) {
  const c10::Device device = parse_device(cursor).toDevice();
  if (!device.is_cpu()) cursor.fail("the generator of the CPU before this");
  return at::globalContext().defaultGenerator(device);
}

c10::IValue parse_complex(Cursor& cursor) {
  cursor.expect("(");
  const double real = cursor.real("the real part");
  cursor.expect(",");
  const double imaginary = cursor.real("the imaginary part");
  cursor.expect(")");
  return c10::complex<double>(real, imaginary);
}

/// As it stands in a tensor: no tensor itself.
at::Scalar parse_scalar(Cursor& cursor) {
  if (cursor.accept("True")) return true;
  if (cursor.accept("False")) return false;
  if (cursor.accept("complex")) return parse_complex(cursor).toScalar();
  return parse_number(cursor).toScalar();
}

c10::IValue parse_tensor(Cursor& cursor) {
  cursor.expect("(");
  const auto number = parse_scalar(cursor);
  cursor.expect(",");
  const auto dtype = dtype_of_name(cursor.word("a dtype"));
  if (!dtype) cursor.fail("a dtype before this");
  try {
    const c10::IValue tensor = at::scalar_to_tensor(number).to(*dtype);
    text_of_constant(tensor, *c10::TensorType::get());  // not every dtype has numbers to print
    cursor.expect(")");
    return tensor;
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    if (what.starts_with("Graph::parse")) throw;
    cursor.fail("a dtype of numbers before this (" + what + ")");
  }
}

c10::IValue parse_number_tensor(Cursor& cursor) {
  cursor.expect("(");
  const auto number = parse_scalar(cursor);
  cursor.expect(")");
  return number_tensor(number);
}

/// What stands for itself by a word.
std::optional<c10::IValue> parse_named(Cursor& cursor, const c10::Type& type) {
  if (cursor.accept("None")) return c10::IValue();
  if (cursor.accept("True")) return true;
  if (cursor.accept("False")) return false;
  if (cursor.accept("device")) return parse_device(cursor);
  if (cursor.accept("generator")) return parse_generator(cursor);
  if (cursor.accept("complex")) return parse_complex(cursor);
  if (cursor.accept("number")) return parse_number_tensor(cursor);
  if (cursor.accept("tensor")) return parse_tensor(cursor);
  Cursor ahead = cursor;
  if (std::isalpha(static_cast<unsigned char>(cursor.peek())) == 0) return std::nullopt;
  const auto number = number_of_name(ahead.word("a name"), type);
  if (!number) return std::nullopt;
  cursor = ahead;
  return *number;
}

c10::TypePtr element_type(const c10::TypePtr& declared, const std::vector<c10::IValue>& elements) {
  const auto type = required(declared);
  if (const auto list = type->cast<c10::ListType>()) return list->getElementType();
  return elements.empty() ? c10::TypePtr(c10::AnyType::get()) : elements.front().type();
}

/// The list's element type as operators know it: a list of SymInts holds ints.
c10::TypePtr stored_type(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
      return c10::IntType::get();
    default:
      return type;
  }
}

c10::IValue parse_constant(Cursor& cursor, const c10::TypePtr& declared);

c10::IValue parse_list(Cursor& cursor, const c10::TypePtr& declared) {
  cursor.expect("[");
  const auto list_type = required(declared)->cast<c10::ListType>();
  const c10::TypePtr element =
      list_type ? list_type->getElementType() : c10::TypePtr(c10::AnyType::get());
  std::vector<c10::IValue> elements;
  while (!cursor.accept("]")) {
    if (!elements.empty()) cursor.expect(",");
    elements.push_back(parse_constant(cursor, element));
  }
  const auto stored = stored_type(element_type(declared, elements));
  c10::impl::GenericList list(stored);
  for (auto& each : elements) {
    if (!each.type()->isSubtypeOf(*stored))
      cursor.fail("elements of one type in the list before this");
    list.push_back(std::move(each));
  }
  return list;
}

c10::IValue parse_constant(Cursor& cursor, const c10::TypePtr& declared) {
  if (cursor.peek() == '"') return cursor.quoted();
  if (cursor.peek() == '[') {
    // Lists of lists have no use in schemas; a text of brackets must not become deep recursion.
    const auto type = required(declared);
    Cursor inner = cursor;
    inner.expect("[");
    if (inner.peek() == '[') inner.fail("a list of numbers");
    return parse_list(cursor, declared);
  }
  if (auto named = parse_named(cursor, *required(declared))) return *named;
  return parse_number(cursor);
}

bool takes_tensors(const c10::Argument* declared) {
  if (declared == nullptr) return true;
  const auto list = required(declared->type())->cast<c10::ListType>();
  return list && required(list->getElementType())->kind() == c10::TypeKind::TensorType;
}

bool at_value(Cursor cursor) { return cursor.peek() == '%' || cursor.accept("_"); }

ParsedArgument parse_values(Cursor& cursor, const DefinedValues& known) {
  std::vector<ValueId> values;
  std::optional<bool> marked;
  while (!cursor.accept("]")) {
    if (!values.empty()) cursor.expect(",");
    values.push_back(parse_use(cursor, known));
    const bool mark = cursor.accept("!");
    if (values.back() == kNoValue) continue;
    if (marked.value_or(mark) != mark) cursor.fail("all elements of the list with '!', or none,");
    marked = mark;
  }
  return {Argument::of(std::move(values)), marked.value_or(false)};
}

}  // namespace

ValueId parse_value_number(Cursor& cursor) {
  constexpr int64_t kMost = 1 << 20;
  cursor.expect("%");
  const int64_t number = cursor.integer("the number of a value");
  if (number < 0 || number >= kMost) cursor.fail("a value number from 0 to 1048575 before this");
  return static_cast<ValueId>(number);
}

ValueId parse_use(Cursor& cursor, const DefinedValues& known) {
  if (cursor.accept("_")) return kNoValue;
  const ValueId value = parse_value_number(cursor);
  if (!known.is_defined(value))
    cursor.fail("a value that is defined above, not %" + std::to_string(value) + ",");
  return value;
}

ParsedArgument parse_argument(Cursor& cursor, const c10::Argument* declared,
                              const DefinedValues& known) {
  if (at_value(cursor)) {
    ParsedArgument parsed{Argument::of(parse_use(cursor, known))};
    parsed.marked = cursor.accept("!");
    return parsed;
  }
  Cursor ahead = cursor;
  if (ahead.accept("[") && (at_value(ahead) || (ahead.peek() == ']' && takes_tensors(declared)))) {
    cursor = ahead;
    return parse_values(cursor, known);
  }
  const c10::TypePtr any = c10::AnyType::get();
  return {Argument::of(parse_constant(cursor, declared == nullptr ? any : declared->real_type()))};
}

}  // namespace tessera::compiler
