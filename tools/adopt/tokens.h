#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::adopt {

/// What a file has that no C++ has; names the line.
class SourceError : public std::runtime_error {
 public:
  SourceError(int line, const std::string& what) : std::runtime_error(what), line_(line) {}
  int line() const { return line_; }

 private:
  int line_;
};

struct Token {
  enum class Kind { Word, Literal, Mark, HeaderName };
  Kind kind = Kind::Mark;
  std::string_view text;  // in the source
  int line = 0;           // from 1
  bool in_directive = false;
  bool begins_directive = false;  // the '#'

  bool is(std::string_view other) const { return text == other && kind != Kind::Literal; }
  bool is_word() const { return kind == Kind::Word; }
};

/// Words, literals and marks of C++; "::" and "->" are one mark, all others have one byte.
/// Comments, white space and what stands behind `#if 0` are left out. The tokens refer to `source`.
/// Throws SourceError for a comment, string or character literal without an end, and for a NUL
/// byte.
std::vector<Token> tokens_of(std::string_view source);

}  // namespace tessera::adopt
