#include "report/timeline.h"

#include "report/files.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

namespace tessera::report {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostSpans = 20'000;
constexpr double kMostRanks = 1e6;
// Clocks are read one after the other; a child may seem to end a little after its parent.
constexpr double kClockSlack = 0.5;

std::optional<double> number_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return std::nullopt;
  const double value = found->get<double>();
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}

std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

std::vector<int> ranks_in(const Json& value) {
  std::vector<int> ranks;
  for (const auto& entry : value.is_array() ? value : Json::array({value})) {
    if (entry.is_number_integer() && entry.get<double>() >= 0 && entry.get<double>() < kMostRanks)
      ranks.push_back(entry.get<int>());
  }
  return ranks;
}

std::string argument_text(const std::string& key, const Json& value) {
  if (value.is_string()) return key + " " + value.get<std::string>();
  if (key == "bytes" && value.is_number_unsigned()) return size_text(value.get<std::size_t>());
  return key + " " + value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void read_arguments(const Json& arguments, Span& span) {
  for (const auto& [key, value] : arguments.items()) {
    if (key == "peer" || key == "peers") {
      span.peers = ranks_in(value);
      continue;
    }
    if (key == "sequence" && value.is_number_integer()) span.sequence = value.get<std::int64_t>();
    span.detail += (span.detail.empty() ? "" : ", ") + argument_text(key, value);
  }
}

std::optional<Span> read_span(const Json& event) {
  if (!event.is_object() || text_at(event, "ph") != "X") return std::nullopt;
  const auto start = number_at(event, "ts");
  const auto duration = number_at(event, "dur");
  const auto rank = number_at(event, "pid");
  if (!start || !duration || *duration < 0 || !rank || *rank < 0 || *rank >= kMostRanks)
    return std::nullopt;
  Span span;
  span.name = text_at(event, "name");
  span.category = text_at(event, "cat");
  span.rank = static_cast<int>(*rank);
  span.thread =
      static_cast<std::int64_t>(std::clamp(number_at(event, "tid").value_or(0), -1e15, 1e15));
  span.start = *start;
  span.duration = *duration;
  if (const auto arguments = event.find("args"); arguments != event.end() && arguments->is_object())
    read_arguments(*arguments, span);
  return span;
}

bool same_thread(const Span& a, const Span& b) { return a.rank == b.rank && a.thread == b.thread; }

/// Sorts the spans, sets their depths and adds up what each rank's first thread did.
void nest(Timeline& timeline) {
  auto& spans = timeline.spans;
  std::ranges::stable_sort(spans, {}, [](const Span& span) {
    return std::tuple(span.rank, span.thread, span.start, -span.duration);
  });
  for (const auto& span : spans) timeline.first_threads.try_emplace(span.rank, span.thread);
  std::vector<const Span*> around;
  for (auto& span : spans) {
    while (!around.empty() &&
           (!same_thread(*around.back(), span) || around.back()->end() <= span.start ||
            around.back()->end() + kClockSlack < span.end())) {
      around.pop_back();
    }
    span.depth = static_cast<int>(around.size());
    // An operator, say, is part of the forward it runs in.
    if (std::ranges::find(kCategories, span.category) == std::end(kCategories))
      span.category = around.empty() ? "other" : around.back()->category;
    if (span.thread == timeline.first_threads[span.rank]) {
      auto& shares = timeline.shares[span.rank];
      shares[span.category] += span.duration;
      if (!around.empty()) shares[around.back()->category] -= span.duration;
    }
    around.push_back(&span);
  }
}

/// What a rank only waited for was counted as communication.
void move_waits(Timeline& timeline) {
  for (const auto& wait : timeline.waits) {
    if (!wait.is_inferred || wait.thread != timeline.first_threads[wait.rank]) continue;
    timeline.shares[wait.rank]["communication"] -= wait.duration;
    timeline.shares[wait.rank]["wait"] += wait.duration;
  }
}

void keep_longest(Timeline& timeline) {
  auto& spans = timeline.spans;
  if (spans.size() <= kMostSpans) return;
  std::vector<double> durations;
  for (const auto& span : spans) durations.push_back(span.duration);
  const auto last = durations.begin() + static_cast<std::ptrdiff_t>(kMostSpans);
  std::ranges::nth_element(durations, last, std::greater<>());
  const std::size_t all = spans.size();
  std::erase_if(spans, [least = *last](const Span& span) { return span.duration <= least; });
  timeline.left_out = all - spans.size();
}

}  // namespace

Timeline read_timeline(const std::string& text) {
  const Json trace = parse_json(text);
  const Json* events = &trace;
  if (trace.is_object()) events = trace.contains("traceEvents") ? &trace["traceEvents"] : nullptr;
  if (events == nullptr || !events->is_array()) throw ReportError("expected a list traceEvents");
  Timeline timeline;
  for (const auto& event : *events) {
    if (auto span = read_span(event)) timeline.spans.push_back(*std::move(span));
  }
  if (timeline.spans.empty()) return timeline;
  const double begin = std::ranges::min(timeline.spans, {}, &Span::start).start;
  for (auto& span : timeline.spans) {
    span.start -= begin;
    timeline.duration = std::max(timeline.duration, span.end());
  }
  nest(timeline);
  timeline.waits = find_waits(timeline.spans);
  move_waits(timeline);
  keep_longest(timeline);
  return timeline;
}

namespace {

constexpr double kShortestWait = 1;  // microsecond; below that clocks tell nothing
constexpr std::size_t kMostWaits = 5'000;

void add_told_waits(const std::vector<Span>& spans, std::vector<Wait>& waits) {
  std::vector<const Span*> around;  // by depth
  for (const auto& span : spans) {
    around.resize(static_cast<std::size_t>(span.depth));
    around.push_back(&span);
    if (span.category != "wait") continue;
    const Span* outer = span.depth > 0 ? around[around.size() - 2] : nullptr;
    const bool is_inside = outer != nullptr && outer->category == "communication";
    Wait wait{
        span.rank,   -1,        span.start, span.duration, is_inside ? outer->name : span.name,
        span.thread, span.depth};
    if (span.peers.empty()) waits.push_back(wait);
    for (const int peer : span.peers) {
      wait.peer = peer;
      waits.push_back(wait);
    }
  }
}

/// A collective cannot end before the last rank has come to it. Collectives of one name are matched
/// by their sequence number, else by their order on each rank.
void add_inferred_waits(const std::vector<Span>& spans, std::vector<Wait>& waits) {
  std::map<std::tuple<std::string, bool, std::int64_t>, std::vector<const Span*>> meetings;
  std::map<std::pair<int, std::string>, std::int64_t> seen;
  for (const auto& span : spans) {
    if (span.category != "communication") continue;
    const bool has_sequence = span.sequence >= 0;
    const std::int64_t which = has_sequence ? span.sequence : seen[{span.rank, span.name}]++;
    meetings[{span.name, has_sequence, which}].push_back(&span);
  }
  for (const auto& [key, members] : meetings) {
    const Span* last = *std::ranges::max_element(members, {}, &Span::start);
    for (const Span* span : members) {
      const double duration = std::min(last->start - span->start, span->duration);
      const bool can_wait = span->rank != last->rank && last->start < span->end() + kShortestWait;
      if (can_wait && duration > kShortestWait)
        waits.push_back({span->rank, last->rank, span->start, duration, span->name, span->thread,
                         span->depth, true});
    }
  }
}

}  // namespace

std::vector<Wait> find_waits(const std::vector<Span>& spans) {
  std::vector<Wait> waits;
  add_told_waits(spans, waits);
  // Where ranks tell of waits one without any has not waited, and names of collectives do not tell
  // the groups of a mesh apart.
  if (waits.empty()) add_inferred_waits(spans, waits);
  if (waits.size() > kMostWaits) {
    std::ranges::nth_element(waits, waits.begin() + kMostWaits, std::greater<>(), &Wait::duration);
    waits.resize(kMostWaits);
  }
  std::ranges::sort(waits, {}, [](const Wait& wait) { return std::pair(wait.start, wait.rank); });
  return waits;
}

}  // namespace tessera::report
