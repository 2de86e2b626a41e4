#include "parallel/pattern.h"

#include <optional>

namespace tessera::parallel {
namespace {

/// A set of characters at the front of a pattern, "[a-c]…" or "[!a-c]…".
struct CharacterSet {
  bool contains_it;
  size_t length;  // of the set in the pattern
};

bool is_between(unsigned char low, unsigned char character, unsigned char high) {
  return low <= character && character <= high;
}

std::optional<CharacterSet> read_set(std::string_view pattern, char character) {
  size_t at = 1;
  const bool is_negated = at < pattern.size() && pattern[at] == '!';
  if (is_negated) ++at;
  bool is_member = false;
  // The first character belongs to the set even if it is the bracket that would close it.
  for (const size_t first = at; at < pattern.size(); ++at) {
    if (pattern[at] == ']' && at > first) return CharacterSet{is_member != is_negated, at + 1};
    const bool is_range =
        at + 2 < pattern.size() && pattern[at + 1] == '-' && pattern[at + 2] != ']';
    if (is_range) {
      is_member = is_member || is_between(pattern[at], character, pattern[at + 2]);
      at += 2;
    } else {
      is_member = is_member || pattern[at] == character;
    }
  }
  return std::nullopt;
}

/// How much of the pattern one character takes; none if it does not match.
std::optional<size_t> match_one(std::string_view pattern, char character) {
  if (pattern.empty()) return std::nullopt;
  if (pattern[0] == '?') return 1;
  if (pattern[0] == '[') {
    if (const auto set = read_set(pattern, character))
      return set->contains_it ? std::optional(set->length) : std::nullopt;
  }
  return pattern[0] == character ? std::optional<size_t>(1) : std::nullopt;
}

}  // namespace

std::vector<std::string> split_components(const std::string& pattern) {
  std::vector<std::string> components;
  if (pattern.empty()) return components;
  for (size_t begin = 0;;) {
    const auto dot = pattern.find('.', begin);
    components.push_back(pattern.substr(begin, dot - begin));
    if (dot == std::string::npos) return components;
    begin = dot + 1;
  }
}

bool matches(std::string_view pattern, std::string_view name) {
  // After a mismatch the last star takes one character more.
  std::optional<std::string_view> after_star;
  std::string_view retry_at;
  while (!name.empty()) {
    if (!pattern.empty() && pattern[0] == '*') {
      pattern.remove_prefix(1);
      after_star = pattern;
      retry_at = name;
    } else if (const auto taken = match_one(pattern, name[0])) {
      pattern.remove_prefix(*taken);
      name.remove_prefix(1);
    } else if (after_star) {
      retry_at.remove_prefix(1);
      pattern = *after_star;
      name = retry_at;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*') == std::string_view::npos;
}

}  // namespace tessera::parallel
