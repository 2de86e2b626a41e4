#include "adopt/tokens.h"

#include <algorithm>
#include <array>
#include <utility>

namespace tessera::adopt {
namespace {

constexpr std::size_t kLongestDelimiter = 16;  // of raw strings, by the standard

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Letters of names; all of UTF-8 beyond ASCII counts.
bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' ||
         static_cast<unsigned char>(c) >= 0x80;
}

bool is_name_part(char c) { return is_letter(c) || is_digit(c); }

template <std::size_t N>
bool is_one_of(std::string_view word, const std::array<std::string_view, N>& words) {
  return std::ranges::find(words, word) != words.end();
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) {}

  std::vector<Token> run() {
    refuse_nul();
    if (source_.starts_with("\xef\xbb\xbf")) at_ = 3;
    for (skip_blanks(); at_ < source_.size(); skip_blanks()) read_token();
    end_directive();
    if (depth_of_skipped_ > 0) tokens_.resize(skipped_);
    return std::move(tokens_);
  }

 private:
  void refuse_nul() const {
    const auto nul = source_.substr(0, source_.find('\0'));
    if (nul.size() == source_.size()) return;
    throw SourceError(1 + static_cast<int>(std::ranges::count(nul, '\n')),
                      "a NUL byte: this is no C++ source, or one in UTF-16");
  }

  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0';
  }
  bool has(std::string_view text) const { return source_.substr(at_).starts_with(text); }

  void advance(std::size_t to) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
    at_ = to;
  }

  /// The end of a backslash at the end of a line, which joins it to the next one; else 0.
  std::size_t end_of_splice(std::size_t at) const {
    if (source_[at] != '\\') return 0;
    const auto end = source_.find_first_not_of(" \t\r", at + 1);
    return end != std::string_view::npos && source_[end] == '\n' ? end + 1 : 0;
  }

  void skip_blanks() {
    while (at_ < source_.size()) {
      const char c = source_[at_];
      if (c == '\n') {
        end_directive();
        is_line_start_ = true;
        advance(at_ + 1);
      } else if (c == ' ' || c == '\t' || c == '\r' || c == '\v' || c == '\f') {
        ++at_;
      } else if (const auto end = end_of_splice(at_)) {
        advance(end);
      } else if (has("//")) {
        skip_line();
      } else if (has("/*")) {
        const auto end = source_.find("*/", at_ + 2);
        if (end == std::string_view::npos)
          throw SourceError(line_, "a comment /* that begins here has no end");
        advance(end + 2);
      } else {
        return;
      }
    }
  }

  /// To the end of the line, and of those that it continues on.
  void skip_line() {
    while (at_ < source_.size() && source_[at_] != '\n') {
      const auto splice = end_of_splice(at_);
      advance(splice != 0 ? splice : at_ + 1);
    }
  }

  void add(Token::Kind kind, std::size_t begin, int line) {
    tokens_.push_back({.kind = kind,
                       .text = source_.substr(begin, at_ - begin),
                       .line = line,
                       .in_directive = in_directive_});
  }

  void read_token() {
    const char c = source_[at_];
    const auto begin = at_;
    const int line = line_;
    // A directive may read beyond its line, up to the beginning of the next one.
    const bool is_first = std::exchange(is_line_start_, false);
    if (c == '#' && is_first && !in_directive_) {
      in_directive_ = true;
      directive_ = tokens_.size();
      ++at_;
      add(Token::Kind::Mark, begin, line);
      tokens_.back().begins_directive = true;
      read_directive_name();
    } else if (is_letter(c)) {
      read_word();
    } else if (is_digit(c) || (c == '.' && is_digit(peek(1)))) {
      skip_number();
      add(Token::Kind::Literal, begin, line);
    } else if (c == '"' || c == '\'') {
      read_quoted(begin);
    } else {
      at_ += has("::") || has("->") ? 2 : 1;
      add(Token::Kind::Mark, begin, line);
    }
  }

  void read_word() {
    constexpr std::array<std::string_view, 5> kRaw = {"R", "u8R", "uR", "UR", "LR"};
    constexpr std::array<std::string_view, 4> kEncodings = {"u8", "u", "U", "L"};
    const auto begin = at_;
    while (at_ < source_.size() && is_name_part(source_[at_])) ++at_;
    const auto word = source_.substr(begin, at_ - begin);
    if (peek() == '"' && is_one_of(word, kRaw) && read_raw(begin)) return;
    if ((peek() == '"' || peek() == '\'') && is_one_of(word, kEncodings)) return read_quoted(begin);
    add(Token::Kind::Word, begin, line_);
  }

  void skip_number() {
    while (at_ < source_.size()) {
      const char c = source_[at_];
      const bool has_sign =
          (c == 'e' || c == 'E' || c == 'p' || c == 'P') && (peek(1) == '+' || peek(1) == '-');
      if (has_sign || (c == '\'' && is_name_part(peek(1)))) {
        at_ += 2;
      } else if (c == '.' || is_name_part(c)) {
        ++at_;
      } else {
        return;
      }
    }
  }

  void read_quoted(std::size_t begin) {
    const char quote = source_[at_];
    const int line = line_;
    auto end = at_ + 1;
    while (end < source_.size() && source_[end] != quote && source_[end] != '\n') {
      const auto splice = end_of_splice(end);
      end = splice != 0 ? splice : end + (source_[end] == '\\' ? 2 : 1);
    }
    end = std::min(end, source_.size());
    const bool is_whole = end < source_.size() && source_[end] == quote;
    if (!is_whole && depth_of_skipped_ == 0) {
      throw SourceError(line, std::string("a ") + (quote == '"' ? "string" : "character") +
                                  " literal that begins here has no end");
    }
    advance(is_whole ? end + 1 : end);
    add(Token::Kind::Literal, begin, line);
  }

  /// False if what begins here is none.
  bool read_raw(std::size_t begin) {
    const auto open = source_.find('(', at_ + 1);
    const auto delimiter = source_.substr(at_ + 1, open - at_ - 1);
    const bool is_raw = open != std::string_view::npos && delimiter.size() <= kLongestDelimiter &&
                        delimiter.find_first_of(" \t\r\n\\\")") == std::string_view::npos;
    std::size_t close = std::string_view::npos;
    if (is_raw) close = source_.find(")" + std::string(delimiter) + "\"", open);
    if (close == std::string_view::npos) {
      if (depth_of_skipped_ > 0) return false;
      throw SourceError(line_, is_raw ? "a raw string that begins here has no end"
                                      : "expected R\"delimiter(…)delimiter\"");
    }
    const int line = line_;
    advance(close + delimiter.size() + 2);
    add(Token::Kind::Literal, begin, line);
    return true;
  }

  void read_directive_name() {
    constexpr std::array<std::string_view, 3> kIncludes = {"include", "include_next", "import"};
    constexpr std::array<std::string_view, 3> kProse = {"error", "warning", "pragma"};
    skip_blanks();
    if (!in_directive_ || !is_letter(peek())) return;
    read_word();
    const auto name = tokens_.back().text;
    if (is_one_of(name, kProse)) {
      for (skip_blanks(); in_directive_ && at_ < source_.size(); skip_blanks()) ++at_;
    } else if (is_one_of(name, kIncludes)) {
      skip_blanks();
      if (!in_directive_ || (peek() != '<' && peek() != '"')) return;
      const auto begin = at_;
      const char closing = peek() == '<' ? '>' : '"';
      const auto end = source_.find_first_of(std::string{closing, '\n'}, at_ + 1);
      const bool is_whole = end != std::string_view::npos && source_[end] != '\n';
      if (!is_whole && depth_of_skipped_ > 0) return;
      if (!is_whole) throw SourceError(line_, "expected a file's name between <> or \"\"");
      at_ = end + 1;
      add(Token::Kind::HeaderName, begin, line_);
    }
  }

  /// At the end of each directive: goes into what `#if 0` leaves out, and out of it.
  void end_directive() {
    if (!in_directive_) return;
    in_directive_ = false;
    const auto word = [&](std::size_t index) {
      return directive_ + index < tokens_.size() ? tokens_[directive_ + index].text : "";
    };
    const auto name = word(1);
    if (depth_of_skipped_ == 0) {
      if (name == "if" && word(2) == "0" && directive_ + 3 == tokens_.size()) {
        depth_of_skipped_ = 1;
        skipped_ = tokens_.size();
      }
      return;
    }
    const bool opens = name == "if" || name == "ifdef" || name == "ifndef";
    const bool divides = depth_of_skipped_ == 1 && name.starts_with("el");
    depth_of_skipped_ += opens ? 1 : name == "endif" || divides ? -1 : 0;
    const auto kept = depth_of_skipped_ == 0 ? directive_ : tokens_.size();
    tokens_.erase(tokens_.begin() + static_cast<std::ptrdiff_t>(skipped_),
                  tokens_.begin() + static_cast<std::ptrdiff_t>(kept));
  }

  std::string_view source_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool is_line_start_ = true;
  bool in_directive_ = false;
  std::size_t directive_ = 0;  // its first token
  int depth_of_skipped_ = 0;   // of #if inside `#if 0`; 0: outside
  std::size_t skipped_ = 0;    // the first token of what is left out
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source) { return Lexer(source).run(); }

}  // namespace tessera::adopt
