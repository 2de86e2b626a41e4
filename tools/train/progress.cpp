#include "train/progress.h"

#include "train/terminal.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <utility>

namespace tessera::train {
namespace {

template <class... A>
std::string format(const char* pattern, A... values) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

std::string format_count(double count) {
  if (count >= 1e6) return format("%.2fM", count / 1e6);
  if (count >= 1e4) return format("%.1fk", count / 1e3);
  return format("%.0f", count);
}

std::string bar(double done, int width) {
  const int full = static_cast<int>(std::floor(done * width));
  std::string text;
  for (int i = 0; i < width; ++i) text += i < full ? "━" : "─";
  return text;
}

/// `is_short` leaves out what can be worked out from the rest.
std::string describe(const StepReport& report, bool is_short = false) {
  auto text = format("step %lld/%lld  loss %.4f  %s tokens/s", static_cast<long long>(report.step),
                     static_cast<long long>(report.steps), report.loss,
                     format_count(report.tokens_per_second).c_str());
  if (report.ranks > 1 && !is_short)
    text += format(" (%s a rank)", format_count(report.tokens_per_second / report.ranks).c_str());
  text += format("  comm %.0f %%  %s  %s left", 100 * report.communication,
                 format_size(report.memory).c_str(), format_duration(report.seconds_left).c_str());
  return text;
}

// The line above, cleared: the launcher passes whole lines on, so the line has ended already.
constexpr const char* kRewrite = "\033[1A\033[2K";

}  // namespace

std::string format_size(int64_t bytes) {
  const auto size = static_cast<double>(bytes);
  return size >= 1e9 ? format("%.2f GB", size / 1e9) : format("%.0f MB", size / 1e6);
}

std::string format_duration(double seconds) {
  const auto whole = static_cast<long long>(std::max(0.0, std::round(seconds)));
  if (whole >= 3600) return format("%lld h %02lld min", whole / 3600, whole / 60 % 60);
  if (whole >= 60) return format("%lld min %02lld s", whole / 60, whole % 60);
  return format("%lld s", whole);
}

Progress::Progress(int64_t log_every) : columns_(terminal_columns()), log_every_(log_every) {}

void Progress::show(const StepReport& report) {
  auto text = describe(report);
  if (columns_ == 0) {
    const bool is_due = log_every_ > 0 && (report.step % log_every_ == 0 || report.step == 1);
    if (is_due || report.done >= 1) std::cout << text + "\n" << std::flush;
    return;
  }
  if (std::cmp_greater_equal(text.size(), columns_)) text = describe(report, /*is_short=*/true);
  const int room = columns_ - static_cast<int>(text.size()) - 3;
  text = text.substr(0, static_cast<size_t>(std::max(0, columns_ - 1)));
  if (room >= 10) text = bar(report.done, std::min(room, 30)) + "  " + text;
  std::cout << (line_.empty() ? "" : kRewrite) + text + "\n" << std::flush;
  line_ = text;
}

void Progress::say(const std::string& text) {
  if (line_.empty()) {
    std::cout << text + "\n" << std::flush;
    return;
  }
  // The line moves down: what stays takes its place.
  std::cout << kRewrite + text + "\n" + line_ + "\n" << std::flush;
}

}  // namespace tessera::train
