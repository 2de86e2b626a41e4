#include "train/progress.h"

#include "train/terminal.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <numeric>

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

/// In at most so many characters, where the step alone has room.
std::string describe(const StepReport& report, size_t room = std::string::npos) {
  std::array<std::string, 8> parts = {
      format("step %lld/%lld", static_cast<long long>(report.step),
             static_cast<long long>(report.steps)),
      format("  loss %.4f", report.loss),
      format("  %s tokens/s", format_count(report.tokens_per_second).c_str()),
      report.ranks == 1
          ? ""
          : format(" (%s a rank)", format_count(report.tokens_per_second / report.ranks).c_str()),
      format("  comm %.0f %%", 100 * report.communication),
      report.utilization ? format("  MFU %.0f %%", 100 * *report.utilization) : "",
      format("  %s", format_size(report.memory).c_str()),
      format("  %s left", format_duration(report.seconds_left).c_str())};
  const auto join = [&] { return std::accumulate(parts.begin(), parts.end(), std::string()); };
  for (const size_t least_needed : {3U, 6U, 4U, 5U, 2U, 7U, 1U}) {
    if (join().size() <= room) break;
    parts[least_needed].clear();
  }
  return join();
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
  if (columns_ <= 0) {
    const bool is_due = log_every_ > 0 && (report.step % log_every_ == 0 || report.step == 1);
    if (is_due || report.is_last) std::cout << describe(report) + "\n" << std::flush;
    return;
  }
  const auto most = static_cast<size_t>(columns_ - 1);  // in the last column some begin a line
  auto text = describe(report, most).substr(0, most);
  const int room = columns_ - static_cast<int>(text.size()) - 3;
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
