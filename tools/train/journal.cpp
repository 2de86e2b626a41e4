#include "train/journal.h"

#include <tessera/comm.h>

#include <chrono>
#include <cstdio>

namespace tessera::train {
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

void Journal::validation(int64_t step, double loss, double seconds) {
  if (!is_here_) return;
  char text[96];
  std::snprintf(text, sizeof text, "validation loss %.4f after step %lld", loss,
                static_cast<long long>(step));
  progress_.say(text);
  folder_.add_metrics({{"step", step}, {"val_loss", loss}, {"seconds", seconds}});
  events().scalar("validation_loss", loss, step, wall_time());
  events().flush();
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
