#include "report/timeline.h"

#include <algorithm>
#include <tuple>

namespace tessera::report {
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
