#include "train/journal.h"

#include <tessera/comm.h>

#include "train/terminal.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <numbers>
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
  const int halves = static_cast<int>(std::floor(2 * done * width));
  std::string text;
  for (int i = 0; i < width; ++i) text += 2 * i + 1 < halves ? "━" : 2 * i < halves ? "╸" : "─";
  return text;
}

/// In at most so many characters, where the step alone has room.
std::string describe(const StepReport& report, size_t room = std::string::npos) {
  std::array<std::string, 9> parts = {
      format("step %lld/%lld", static_cast<long long>(report.step),
             static_cast<long long>(report.steps)),
      format("  loss %.4f", report.loss),
      report.nats_per_byte ? format("  %.3f nats/byte", *report.nats_per_byte) : "",
      format("  %s tokens/s", format_count(report.tokens_per_second).c_str()),
      report.ranks == 1
          ? ""
          : format(" (%s a rank)", format_count(report.tokens_per_second / report.ranks).c_str()),
      format("  comm %.0f %%", 100 * report.communication),
      report.utilization ? format("  MFU %.0f %%", 100 * *report.utilization) : "",
      format("  %s", format_size(report.memory).c_str()),
      format("  %s left", format_duration(report.seconds_left).c_str())};
  const auto join = [&] { return std::accumulate(parts.begin(), parts.end(), std::string()); };
  for (const size_t least_needed : {4U, 7U, 5U, 6U, 3U, 2U, 8U, 1U}) {
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

std::string summary_of(const Result& result) {
  auto text = format("%s of %.2f M parameters", result.model.c_str(),
                     static_cast<double>(result.parameters) / 1e6);
  if (result.nats_per_byte)
    text += format(": %.3f nats (%.3f bits) per byte of unseen text", *result.nats_per_byte,
                   *result.nats_per_byte / std::numbers::ln2);
  return text + format(" after %s and %s tokens, %s tokens/s on %d rank%s",
                       format_duration(result.seconds).c_str(),
                       format_count(static_cast<double>(result.tokens)).c_str(),
                       format_count(result.tokens_per_second).c_str(), result.ranks,
                       result.ranks == 1 ? "" : "s");
}

std::string forecast_of(double tokens_per_second, int64_t context) {
  constexpr double kTokens = 1e10, kHour = 3600;
  const double hours = kTokens / tokens_per_second / kHour;
  const bool is_long = hours >= 48;
  return format(
      "10 B tokens, as much as OpenWebText, would take %.1f %s at %s tokens/s (context %lld)",
      is_long ? hours / 24 : hours, is_long ? "days" : "hours",
      format_count(tokens_per_second).c_str(), static_cast<long long>(context));
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

namespace {

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Journal::Journal(RunFolder& folder, int64_t log_every)
    : folder_(folder), is_here_(rank() == 0), progress_(log_every) {}

EventWriter& Journal::events() {
  if (!events_) events_ = std::make_unique<EventWriter>(folder_.path() + "/events");
  return *events_;
}

void Journal::step(const StepReport& report, const nlohmann::json& further) {
  if (!is_here_) return;
  progress_.show(report);
  nlohmann::json line = {{"step", report.step},
                         {"loss", report.loss},
                         {"lr", report.learning_rate},
                         {"tokens_per_s", report.tokens_per_second},
                         {"comm_share", report.communication},
                         {"memory_bytes", report.memory}};
  if (report.utilization) line["mfu"] = *report.utilization;
  line.update(further);
  folder_.add_metrics(line);
  const auto time = wall_time();
  events().scalar("loss", report.loss, report.step, time);
  events().scalar("learning_rate", report.learning_rate, report.step, time);
  events().scalar("tokens_per_second", report.tokens_per_second, report.step, time);
  events().scalar("communication_share", report.communication, report.step, time);
  events().scalar("memory_bytes", static_cast<double>(report.memory), report.step, time);
  if (report.utilization) events().scalar("mfu", *report.utilization, report.step, time);
  events().flush();
}

void Journal::validation(int64_t step, double loss, std::optional<double> nats_per_byte,
                         double seconds) {
  if (!is_here_) return;
  auto text = format("validation loss %.4f after step %lld", loss, static_cast<long long>(step));
  nlohmann::json line = {{"step", step}, {"val_loss", loss}, {"seconds", seconds}};
  const auto time = wall_time();
  events().scalar("validation_loss", loss, step, time);
  if (nats_per_byte) {
    text += format(": %.3f nats (%.3f bits) per byte", *nats_per_byte,
                   *nats_per_byte / std::numbers::ln2);
    line["val_nats_per_byte"] = *nats_per_byte;
    events().scalar("validation_nats_per_byte", *nats_per_byte, step, time);
  }
  progress_.say(text);
  folder_.add_metrics(line);
  events().flush();
}

void Journal::communication(int64_t step, const std::vector<UnitCommunication>& units) {
  if (!is_here_) return;
  const auto rows = to_json(units);
  folder_.add_metrics({{"step", step}, {"communication", rows}});
  folder_.write("communication.json", rows.dump(1) + "\n");
  const auto time = wall_time();
  for (const auto& unit : units) {
    events().scalar("communication_seconds/" + unit.name, unit.seconds, step, time);
    events().scalar("communication_bytes/" + unit.name, unit.bytes, step, time);
  }
  events().flush();
  progress_.say(described(units));
}

void Journal::event(const std::string& kind, int64_t step, const std::string& text) {
  if (!is_here_) return;
  folder_.add_metrics({{"event", kind}, {"step", step}, {"text", text}});
  if (!text.empty()) progress_.say(text);
}

void Journal::say(const std::string& text) {
  if (is_here_) progress_.say(text);
}

void Journal::file(const std::string& name, const std::string& text) {
  if (is_here_) folder_.write(name, text);
}

void Journal::remove(const std::string& name) {
  if (is_here_) folder_.remove(name);
}

}  // namespace tessera::train
