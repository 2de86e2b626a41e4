#include "base/text.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <numeric>

namespace tessera {
namespace {

std::string print(const char* format, double value, const char* unit) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value, unit);
  return text.data();
}

/// How many bytes the UTF-8 character at the beginning of `text` has, and which it is; none: no
/// such character.
struct Character {
  size_t bytes = 0;
  uint32_t code = 0;
};

Character first_character(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return {1, lead};
  const size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return {};
  uint32_t code = lead & (0x7FU >> bytes);
  for (const char next : text.substr(1, bytes - 1)) {
    if ((static_cast<unsigned char>(next) & 0xC0U) != 0x80U) return {};
    code = code << 6 | (static_cast<unsigned char>(next) & 0x3FU);
  }
  constexpr std::array<uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
  if (code < kLeast[bytes] || is_surrogate || code > 0x10FFFF) return {};
  return {bytes, code};
}

bool is_harmless(uint32_t code) {
  const bool is_control = code < 0x20 || (code >= 0x7F && code < 0xA0);
  const bool turns_lines = code == 0x061C || (code >= 0x200E && code <= 0x200F) ||
                           (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
  return !is_control && !turns_lines;
}

std::string escaped(unsigned char byte) {
  if (byte == '\n') return "\\n";
  if (byte == '\t') return "\\t";
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "\\x%02x", byte);
  return text.data();
}

size_t edit_distance(std::string_view left, std::string_view right) {
  std::vector<size_t> row(right.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < left.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < right.size(); ++j) {
      const size_t replaced = diagonal + (left[i] == right[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, replaced});
    }
  }
  return row.back();
}

}  // namespace

std::string printable(std::string_view text, std::string_view kept) {
  std::string shown;
  while (!text.empty()) {
    const auto [bytes, code] = first_character(text);
    const auto taken = text.substr(0, std::max<size_t>(bytes, 1));
    if (bytes > 0 && (is_harmless(code) || (bytes == 1 && kept.find(text[0]) != kept.npos))) {
      shown += taken;
    } else {
      for (const char byte : taken) shown += escaped(static_cast<unsigned char>(byte));
    }
    text.remove_prefix(taken.size());
  }
  return shown;
}

std::string format_bytes(size_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  auto value = static_cast<double>(bytes);
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return print(
      unit == 0 || value == static_cast<double>(static_cast<size_t>(value)) ? "%.0f %s" : "%.1f %s",
      value, kUnits[unit]);
}

std::string format_list(const std::vector<int>& numbers) {
  if (numbers.empty()) return "none";
  std::string text = std::to_string(numbers.front());
  for (size_t i = 1; i < numbers.size(); ++i) {
    text += i + 1 == numbers.size() ? " and " : ", ";
    text += std::to_string(numbers[i]);
  }
  return text;
}

std::string format_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + format_list(ranks);
}

std::string format_list(const std::vector<std::string>& names) {
  constexpr size_t kMost = 12;
  if (names.empty()) return "none";
  std::string text;
  const size_t shown = std::min(names.size(), kMost);
  for (size_t i = 0; i < shown; ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += '\'';
    text += printable(names[i]);
    text += '\'';
  }
  if (shown < names.size()) text += " and " + std::to_string(names.size() - shown) + " more";
  return text;
}

std::vector<std::string> nearest_names(const std::string& name, std::vector<std::string> names) {
  constexpr size_t kMost = 3;
  std::stable_sort(names.begin(), names.end(), [&](const auto& left, const auto& right) {
    return edit_distance(name, left) < edit_distance(name, right);
  });
  if (names.size() > kMost) names.resize(kMost);
  return names;
}

std::string format_seconds(double seconds) {
  return seconds < 1 ? print("%.0f %s", seconds * 1e3, "ms") : print("%.2f %s", seconds, "s");
}

}  // namespace tessera
