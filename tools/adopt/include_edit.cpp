#include "adopt/rewrite.h"

#include <algorithm>
#include <optional>

namespace tessera::adopt {
namespace {

constexpr const char* kLine = "#include <tessera/nn.h>";

struct Place {
  std::size_t token;
  int depth;  // of #if around it
};

/// The first of the least deep: one in a condition may not be read.
void take(std::optional<Place>& best, const Place& place) {
  if (!best || place.depth < best->depth) best = place;
}

struct Places {
  std::optional<Place> libtorch;  // its first #include
  std::optional<Place> last;      // the last of all
  std::optional<Place> once;      // #pragma once
};

Places places_of(const std::vector<Token>& tokens) {
  Places places;
  int depth = 0;
  for (std::size_t at = 0; at + 1 < tokens.size(); ++at) {
    if (!tokens[at].begins_directive) continue;
    const auto name = tokens[at + 1].text;
    if (name.starts_with("if")) ++depth;
    if (name == "endif") --depth;
    if (name == "pragma") take(places.once, {at, depth});
    if (at + 2 >= tokens.size() || tokens[at + 2].kind != Token::Kind::HeaderName) continue;
    const auto file = tokens[at + 2].text.substr(1);
    const bool is_libtorch = file.starts_with("torch/") || file.starts_with("ATen/");
    if (is_libtorch) take(places.libtorch, {at, depth});
    if (!places.last || depth <= places.last->depth) places.last = {at, depth};
  }
  return places;
}

std::size_t begin_of_line(const std::string& text, std::size_t offset) {
  const auto end = text.rfind('\n', offset);
  return offset == 0 || end == std::string::npos ? 0 : end + 1;
}

/// Behind the line, and those that it continues on.
std::size_t end_of_line(const std::string& text, std::size_t offset) {
  auto end = text.find('\n', offset);
  while (end != std::string::npos && end > 0) {
    const auto last = text.find_last_not_of(" \t\r", end - 1);
    if (last == std::string::npos || last < offset || text[last] != '\\') return end + 1;
    end = text.find('\n', end + 1);
  }
  return text.size();
}

}  // namespace

Edit include_edit(const Source& source) {
  const auto& text = source.text;
  const auto& tokens = source.tokens;
  const auto places = places_of(tokens);
  const auto first_line = text.find('\n');
  const bool has_cr =
      first_line != std::string::npos && first_line > 0 && text[first_line - 1] == '\r';
  const std::string end = has_cr ? "\r\n" : "\n";
  const auto offset = [&](std::size_t token) {
    return static_cast<std::size_t>(tokens[token].text.data() - text.data());
  };
  std::size_t at = tokens.empty() ? 0 : begin_of_line(text, offset(0));
  if (places.libtorch) {
    at = begin_of_line(text, offset(places.libtorch->token));
  } else if (places.last) {
    at = end_of_line(text, offset(places.last->token));
  } else if (places.once) {
    at = end_of_line(text, offset(places.once->token));
  }
  if (at == 0 && text.starts_with("\xef\xbb\xbf")) at = 3;
  const bool lacks_end = at == text.size() && !text.ends_with('\n');
  return {at, 0, lacks_end ? end + kLine : kLine + end};
}

}  // namespace tessera::adopt
