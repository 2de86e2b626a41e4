#include "comm/late.h"

#include "base/environment.h"
#include "base/text.h"

#include <iostream>
#include <limits>

namespace tessera::comm {
namespace {

constexpr int64_t kLateSeconds = 30;

std::chrono::seconds late_after() {
  static const auto seconds = [] {
    const auto chosen = Environment().get_int("TESSERA_LATE_AFTER").value_or(kLateSeconds);
    return chosen > 0 ? chosen : std::numeric_limits<int32_t>::max();
  }();
  return std::chrono::seconds(seconds);
}

}  // namespace

bool LateNotice::is_due(Clock::time_point since) {
  if (Clock::now() - since < late_after()) return false;
  return told_.exchange(since) != since;
}

void tell_late(const std::string& waiting, const std::string& awaited,
               LateNotice::Clock::time_point since, const std::string& what,
               LateNotice::Clock::time_point deadline) {
  const auto seconds = [](auto span) {
    return format_seconds(std::chrono::duration<double>(span).count());
  };
  std::string text = "tessera: ";
  text.append(waiting).append(" has waited ").append(seconds(LateNotice::Clock::now() - since));
  text.append(" for ").append(awaited).append(": ").append(what);
  text.append("; it gives up after ").append(seconds(deadline - since)).append("\n");
  std::cerr << text << std::flush;
}

}  // namespace tessera::comm
