#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera::data {

/// What tokenizers' patterns tell apart: \p{L}, \p{N}, \s and the rest.
enum class CharClass : uint8_t { Other, Letter, Number, Space };

struct ClassRange {
  uint32_t first;
  uint32_t last;
  CharClass char_class;
};

/// Of all of Unicode, by code point; what is in none is Other.
std::span<const ClassRange> class_ranges();

CharClass class_of(uint32_t code_point);

/// What the package `tokenizers` takes for digits besides the numbers: its pre-tokenizer Digits
/// knows a later Unicode than its patterns.
std::span<const ClassRange> further_digit_ranges();
bool is_digit(uint32_t code_point);

/// A code point in a text and how many bytes it takes. Where the text is no UTF-8: U+FFFD for as
/// many bytes as Unicode advises to replace by one.
struct Utf8Char {
  uint32_t code_point;
  uint32_t length;
  bool valid;
};
Utf8Char utf8_at(std::string_view text, size_t at);

bool is_utf8(std::string_view text);
/// The text with U+FFFD in place of what is no UTF-8.
std::string replace_invalid_utf8(std::string_view text);
/// Appends the code point as UTF-8.
void append_utf8(uint32_t code_point, std::string& text);

}  // namespace tessera::data
