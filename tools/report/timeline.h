#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::report {

/// A stretch of time on one rank, in microseconds from the timeline's beginning.
struct Span {
  std::string name;
  std::string category;  // one of kCategories; a span of another takes that of the one around it
  int rank = 0;
  std::int64_t thread = 0;
  double start = 0;
  double duration = 0;
  int depth = 0;               // spans of the same thread around it
  std::vector<int> peers;      // the ranks its "peer" or "peers" names
  std::string detail;          // its other arguments
  std::int64_t sequence = -1;  // of a collective, where the span tells it

  double end() const { return start + duration; }
};

/// Time in which a rank could not go on because another had not come yet.
struct Wait {
  int rank = 0;
  int peer = -1;  // -1: the span does not tell
  double start = 0;
  double duration = 0;
  std::string name;         // of the collective, where that is known
  std::int64_t thread = 0;  // where it is drawn
  int depth = 0;
  bool is_inferred = false;  // from when the ranks came to a collective
};

constexpr const char* kCategories[] = {"data",          "forward", "backward", "optimizer",
                                       "communication", "wait",    "kernel",   "other"};

struct Timeline {
  std::vector<Span> spans;  // by rank, thread, start; outer ones before what they hold
  std::vector<Wait> waits;  // by start
  std::map<int, std::int64_t> first_threads;  // by rank
  /// Microseconds that each rank's first thread spent in a category, what nests inside left out.
  std::map<int, std::map<std::string, double>> shares;
  double duration = 0;
  std::size_t left_out = 0;  // short spans beyond the number a page can draw
};

/// Reads a Chrome trace (complete events; pid is the rank) and finds out who waited for whom.
/// Throws std::exception if `text` is none.
Timeline read_timeline(const std::string& text);

/// The waits of spans that nest as Timeline's: those of category "wait" or, if there is none, the
/// time from a rank's entry into a collective until the last rank's.
std::vector<Wait> find_waits(const std::vector<Span>& spans);

}  // namespace tessera::report
