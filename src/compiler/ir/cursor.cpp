#include "compiler/ir/cursor.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <charconv>
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

}  // namespace tessera::compiler
