#include "base/text.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace tessera {
namespace {

std::string print(const char* format, double value, const char* unit) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value, unit);
  return text.data();
}

}  // namespace

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
    text += (i + 1 == numbers.size() ? " and " : ", ") + std::to_string(numbers[i]);
  }
  return text;
}

std::string format_list(const std::vector<std::string>& names) {
  constexpr size_t kMost = 12;
  if (names.empty()) return "none";
  std::string text = "'" + names.front() + "'";
  const size_t shown = std::min(names.size(), kMost);
  for (size_t i = 1; i < shown; ++i)
    text += (i + 1 == names.size() ? " and '" : ", '") + names[i] + "'";
  if (shown < names.size()) text += " and " + std::to_string(names.size() - shown) + " more";
  return text;
}

std::string format_seconds(double seconds) {
  return seconds < 1 ? print("%.0f %s", seconds * 1e3, "ms") : print("%.2f %s", seconds, "s");
}

}  // namespace tessera
