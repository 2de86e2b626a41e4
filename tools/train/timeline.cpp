#include "train/timeline.h"

#include <tessera/comm.h>

#include <ATen/record_function.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <utility>

namespace tessera::train {
namespace {

using nlohmann::json;

int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

json event(const std::string& name, const char* kind, int64_t begin, int64_t end,
           int64_t thread = 0) {
  return {{"name", name},
          {"cat", kind},
          {"ph", "X"},
          {"ts", static_cast<double>(begin) / 1e3},
          {"dur", static_cast<double>(end - begin) / 1e3},
          {"pid", rank()},
          {"tid", thread}};
}

/// Kernels, and the names of the tracks they are on: one per stream, below the spans of the host.
void add_kernels(const std::vector<KernelRecord>& kernels, json& events) {
  std::map<int64_t, int64_t> tracks;  // thread of each stream
  for (const auto& kernel : kernels) {
    const auto [track, is_new] = tracks.try_emplace(kernel.stream, std::ssize(tracks) + 1);
    if (is_new) {
      events.push_back({{"name", "thread_name"},
                        {"ph", "M"},
                        {"pid", rank()},
                        {"tid", track->second},
                        {"args", {{"name", "GPU stream " + std::to_string(kernel.stream)}}}});
    }
    events.push_back(event(kernel.name, "kernel", kernel.begin, kernel.end, track->second));
  }
}

json event_of(const SpanRecord& span) {
  std::string name = span.name;
  if (span.kind == SpanKind::Wait) name = "wait for rank " + std::to_string(span.detail);
  auto made = event(name, name_of(span.kind), span.begin, span.end);
  if (span.kind == SpanKind::Wait) made["args"]["peer"] = span.detail;
  if (span.kind == SpanKind::Communication && span.detail >= 0) made["args"]["bytes"] = span.detail;
  return made;
}

}  // namespace

class Timeline::Operators {
 public:
  struct Record {
    std::string name;
    int64_t begin, end;
  };

  Operators() {
    current = this;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
              return std::make_unique<Begin>();
            },
            [](const at::RecordFunction& function, at::ObserverContext* context) {
              if (current == nullptr) return;
              const auto begin = static_cast<Begin*>(context)->at;
              current->records_.push_back({function.name(), begin, nanoseconds()});
            })
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~Operators() {
    at::removeCallback(handle_);
    current = nullptr;
  }
  std::vector<Record> take() { return std::exchange(records_, {}); }

 private:
  struct Begin : at::ObserverContext {
    int64_t at = nanoseconds();
  };
  // RecordFunction's callbacks are plain functions.
  static thread_local Operators* current;

  std::vector<Record> records_;
  at::CallbackHandle handle_;
};
thread_local Timeline::Operators* Timeline::Operators::current = nullptr;

Timeline::Timeline(bool with_operators, bool with_kernels)
    : operators_(with_operators ? std::make_unique<Operators>() : nullptr) {
  if (with_kernels) kernels_.emplace();
}
Timeline::~Timeline() = default;

std::string Timeline::gather() {
  json own = json::array();
  for (const auto& span : recorder_.take()) own.push_back(event_of(span));
  if (operators_) {
    for (const auto& each : operators_->take())
      own.push_back(event(each.name, "operator", each.begin, each.end));
  }
  if (kernels_) {
    const auto kernels = kernels_->take();
    lacks_kernels_ = kernels.empty();
    add_kernels(kernels, own);
  }
  const auto parts = gather_bytes(own.dump());
  if (rank() != 0) return {};
  json events = json::array();
  for (size_t each = 0; each < parts.size(); ++each) {
    events.push_back({{"name", "process_name"},
                      {"ph", "M"},
                      {"pid", each},
                      {"args", {{"name", "rank " + std::to_string(each)}}}});
    for (auto& span : json::parse(parts[each])) events.push_back(std::move(span));
  }
  return json{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}}.dump();
}

namespace {

// Earlier steps are slower: memory is new, programs are made.
constexpr int64_t kMostUntraced = 5;

}  // namespace

Recordings::Recordings(const Settings& settings, int64_t steps)
    : settings_(settings),
      first_(std::clamp<int64_t>(steps - settings.trace - 1, 0, kMostUntraced)) {}

bool Recordings::begin_with(int64_t step) const {
  return (settings_.trace > 0 && step == first_) || step == first_ + settings_.trace;
}

void Recordings::begin(int64_t step) {
  // Kernels only where a trace is asked for: what records them slows the device down from then on.
  timeline_ = std::make_unique<Timeline>(
      /*with_operators=*/is_trace(step),
      /*with_kernels=*/settings_.trace > 0 && settings_.device != "cpu");
}

bool Recordings::end_with(int64_t step, bool is_last) const {
  return is_on() && (is_last || !is_trace(step) || !is_trace(step + 1));
}

void Recordings::end(int64_t step, Journal& journal) {
  journal.file(is_trace(step) ? "trace.json" : "timeline.json", timeline_->gather());
  if (timeline_->lacks_kernels()) journal.say(kNoKernels);
  timeline_.reset();
}

}  // namespace tessera::train
