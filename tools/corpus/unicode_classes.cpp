#include "corpus/unicode_classes.h"

#include <algorithm>
#include <array>

namespace tessera::data {

namespace {

CharClass search_ranges(std::span<const ClassRange> ranges, uint32_t code_point) {
  const auto after =
      std::upper_bound(ranges.begin(), ranges.end(), code_point,
                       [](uint32_t value, const ClassRange& range) { return value < range.first; });
  if (after == ranges.begin() || std::prev(after)->last < code_point) return CharClass::Other;
  return std::prev(after)->char_class;
}

/// How many bytes follow a first byte, and what the second may be: no overlong forms, no
/// surrogates, nothing above U+10FFFF.
struct Utf8Lead {
  uint32_t following = 0;
  unsigned char second_first = 0x80;
  unsigned char second_last = 0xBF;
};

Utf8Lead utf8_lead(unsigned char byte) {
  if (byte >= 0xC2 && byte <= 0xDF) return {1};
  if (byte == 0xE0) return {2, 0xA0, 0xBF};
  if (byte == 0xED) return {2, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {2};
  if (byte == 0xF0) return {3, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {3};
  if (byte == 0xF4) return {3, 0x80, 0x8F};
  return {};
}

}  // namespace

CharClass class_of(uint32_t code_point) {
  static const auto ascii = [] {
    std::array<CharClass, 128> classes{};
    for (uint32_t c = 0; c < classes.size(); ++c) classes[c] = search_ranges(class_ranges(), c);
    return classes;
  }();
  return code_point < ascii.size() ? ascii[code_point] : search_ranges(class_ranges(), code_point);
}

bool is_digit(uint32_t code_point) {
  return class_of(code_point) == CharClass::Number ||
         search_ranges(further_digit_ranges(), code_point) == CharClass::Number;
}

Utf8Char utf8_at(std::string_view text, size_t at) {
  const auto lead_byte = static_cast<unsigned char>(text[at]);
  if (lead_byte < 0x80) return {lead_byte, 1, true};
  const Utf8Lead lead = utf8_lead(lead_byte);
  uint32_t code_point = lead_byte & (0x3FU >> lead.following);
  for (uint32_t i = 1; i <= lead.following; ++i) {
    const unsigned char byte = at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0;
    const bool fits = i == 1 ? byte >= lead.second_first && byte <= lead.second_last
                             : byte >= 0x80 && byte <= 0xBF;
    if (!fits) return {0xFFFD, i, false};
    code_point = code_point << 6 | (byte & 0x3FU);
  }
  if (lead.following == 0) return {0xFFFD, 1, false};
  return {code_point, lead.following + 1, true};
}

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = utf8_at(text, at);
    if (!c.valid) return false;
    at += c.length;
  }
  return true;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = utf8_at(text, at);
    if (c.valid) {
      result.append(text, at, c.length);
    } else {
      append_utf8(c.code_point, result);
    }
    at += c.length;
  }
  return result;
}

void append_utf8(uint32_t code_point, std::string& text) {
  const auto put = [&](uint32_t byte) { text += static_cast<char>(byte); };
  const auto follow = [&](int shift) { put(0x80 | (code_point >> shift & 0x3F)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    follow(0);
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    follow(6);
    follow(0);
  } else {
    put(0xF0 | code_point >> 18);
    follow(12);
    follow(6);
    follow(0);
  }
}

}  // namespace tessera::data
