#include "corpus/pre_tokenizer.h"

#include "corpus/unicode_classes.h"

#include <array>
#include <cstdint>
#include <limits>

namespace tessera::data {

namespace {

struct RegexRow {
  std::string_view regex;
  WordPattern pattern;
};

constexpr std::array kRegexes = {
    RegexRow{R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
             WordPattern::Gpt2},
    RegexRow{R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
             WordPattern::Gpt2},
    RegexRow{R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
             R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
             WordPattern::Gpt4},
    RegexRow{R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|)"
             R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
             WordPattern::Gpt4SingleDigit},
};

constexpr size_t kUnbounded = std::numeric_limits<size_t>::max();

struct ClassedChar {
  CharClass char_class;
  uint32_t length;
};

ClassedChar char_at(std::string_view text, size_t at) {
  const auto byte = static_cast<unsigned char>(text[at]);
  if (byte < 0x80) return {class_of(byte), 1};
  const Utf8Char c = utf8_at(text, at);
  return {class_of(c.code_point), c.length};
}

bool class_is(CharClass wanted, std::string_view text, size_t at) {
  return at < text.size() && char_at(text, at).char_class == wanted;
}

/// Where the run of characters of this class ends, after `most` of them at the latest.
size_t run_end(CharClass wanted, std::string_view text, size_t at, size_t most = kUnbounded) {
  while (at < text.size() && most > 0) {
    const ClassedChar c = char_at(text, at);
    if (c.char_class != wanted) break;
    at += c.length;
    --most;
  }
  return at;
}

/// `'s|'t|'re|'ve|'m|'ll|'d` after the apostrophe at `at`, which ends there if there is none.
/// Whatever the case: then the long s is an s, too, as in the package.
size_t contraction_end(std::string_view text, size_t at, bool any_case) {
  const auto letter = [&](size_t i) {
    const char c = i < text.size() ? text[i] : '\0';
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  const char first = letter(at + 1);
  const char second = letter(at + 2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
  if ((first == 'r' || first == 'v') && second == 'e') return at + 3;
  if (first == 'l' && second == 'l') return at + 3;
  if (any_case && text.substr(at + 1).starts_with("\u017F")) return at + 3;
  return at;
}

/// `\s+(?!\S)|\s+`: a run of white space leaves its last character to the word that follows it.
size_t space_end(std::string_view text, size_t at) {
  size_t last = at;
  size_t end = at;
  while (end < text.size()) {
    const ClassedChar c = char_at(text, end);
    if (c.char_class != CharClass::Space) break;
    last = end;
    end += c.length;
  }
  return end == text.size() || last == at ? end : last;
}

/// `\s*[\r\n]+`: up to the last line break of the run of white space; `at` if it has none.
size_t line_break_end(std::string_view text, size_t at) {
  const std::string_view run = text.substr(at, run_end(CharClass::Space, text, at) - at);
  const size_t last = run.find_last_of("\r\n");
  return last == std::string_view::npos ? at : at + last + 1;
}

size_t gpt2_end(std::string_view text, size_t begin) {
  if (text[begin] == '\'') {
    if (const size_t end = contraction_end(text, begin, /*any_case=*/false); end > begin)
      return end;
  }
  const size_t after_space = text[begin] == ' ' ? begin + 1 : begin;
  if (after_space < text.size()) {
    const ClassedChar c = char_at(text, after_space);
    if (c.char_class != CharClass::Space)
      return run_end(c.char_class, text, after_space + c.length);
  }
  return space_end(text, begin);
}

size_t gpt4_end(std::string_view text, size_t begin, size_t most_digits) {
  if (text[begin] == '\'') {
    if (const size_t end = contraction_end(text, begin, /*any_case=*/true); end > begin) return end;
  }
  const ClassedChar first = char_at(text, begin);
  const size_t second = begin + first.length;
  if (first.char_class == CharClass::Letter) return run_end(CharClass::Letter, text, second);
  if (first.char_class == CharClass::Number)
    return run_end(CharClass::Number, text, begin, most_digits);
  const bool line_break = text[begin] == '\r' || text[begin] == '\n';
  if (!line_break && class_is(CharClass::Letter, text, second))
    return run_end(CharClass::Letter, text, second);
  const size_t after_space = text[begin] == ' ' ? second : begin;
  if (class_is(CharClass::Other, text, after_space)) {
    size_t end = run_end(CharClass::Other, text, after_space);
    while (end < text.size() && (text[end] == '\r' || text[end] == '\n')) ++end;
    return end;
  }
  const size_t end = line_break_end(text, begin);
  return end > begin ? end : space_end(text, begin);
}

size_t digits_end(std::string_view text, size_t begin, size_t most_digits) {
  const bool digits = is_digit(utf8_at(text, begin).code_point);
  size_t end = begin;
  for (size_t left = digits ? most_digits : kUnbounded; end < text.size() && left > 0; --left) {
    const Utf8Char c = utf8_at(text, end);
    if (is_digit(c.code_point) != digits) break;
    end += c.length;
  }
  return end;
}

}  // namespace

std::optional<WordPattern> pattern_of_regex(std::string_view regex) {
  for (const RegexRow& row : kRegexes) {
    if (row.regex == regex) return row.pattern;
  }
  return std::nullopt;
}

size_t word_end(WordPattern pattern, std::string_view text, size_t begin) {
  switch (pattern) {
    case WordPattern::Gpt2:
      return gpt2_end(text, begin);
    case WordPattern::Gpt4:
      return gpt4_end(text, begin, 3);
    case WordPattern::Gpt4SingleDigit:
      return gpt4_end(text, begin, 1);
    case WordPattern::DigitRuns:
      return digits_end(text, begin, kUnbounded);
    case WordPattern::SingleDigits:
      return digits_end(text, begin, 1);
  }
  return text.size();
}

}  // namespace tessera::data
