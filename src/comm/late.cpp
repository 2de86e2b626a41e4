#include "comm/late.h"

#include "base/environment.h"
#include "base/text.h"

#include <algorithm>
#include <iostream>

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLateSeconds = 30;
constexpr int64_t kLongestSeconds = 100'000'000;

/// init() refuses what is no number.
std::chrono::seconds late_after() noexcept {
  static const auto seconds = [] {
    const auto text = Environment().get("TESSERA_LATE_AFTER");
    const auto chosen = (text ? parse_int(*text) : std::nullopt).value_or(kLateSeconds);
    return chosen > 0 ? std::min(chosen, kLongestSeconds) : kLongestSeconds;
  }();
  return std::chrono::seconds(seconds);
}

}  // namespace

bool is_late(Clock::time_point since) noexcept { return Clock::now() - since >= late_after(); }

void tell_late(const std::string& waiting, const std::string& awaited, Clock::time_point since,
               const std::string& what, Clock::time_point deadline) {
  const auto seconds = [](auto span) {
    return format_seconds(std::chrono::duration<double>(span).count());
  };
  std::string text = "tessera: ";
  text.append(waiting).append(" has waited ").append(seconds(Clock::now() - since));
  text.append(" for ").append(awaited).append(": ").append(what);
  text.append("; it gives up after ").append(seconds(deadline - since)).append("\n");
  std::cerr << text << std::flush;
}

}  // namespace tessera::comm
