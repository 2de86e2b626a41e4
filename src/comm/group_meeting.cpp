#include "comm/group_meeting.h"

#include "base/text.h"
#include "comm/groups.h"
#include "comm/late.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <optional>
#include <sstream>

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// How often a rank that waits looks where the others are.
constexpr milliseconds kLookAtMeeting{100};

std::string list_text(const GroupCall& call) {
  return c10::str(format_ranks(call.ranks),
                  call.count == 0 ? "" : c10::str(" for time ", call.count + 1));
}

std::string encode_call(const GroupCall& call) {
  auto text = std::to_string(call.count);
  for (const int rank : call.ranks) text.append(" ").append(std::to_string(rank));
  return text;
}

GroupCall decode_call(const std::string& text) {
  std::istringstream words(text);
  GroupCall call;
  words >> call.count;
  for (int rank = 0; words >> rank;) call.ranks.push_back(rank);
  return call;
}

class GroupMeeting {
 public:
  GroupMeeting(Context& context, const GroupCall& call, milliseconds timeout)
      : context_(context),
        call_(call),
        store_(*context.world.store),
        topic_("new_group " + name_of(call)),
        timeout_(timeout),
        deadline_(since_ + timeout),
        missing_(call.ranks) {
    for (const int rank : call.ranks) arrivals_.push_back(arrival_of(rank));
  }

  void run() {
    const int own = context_.world.rank;
    store_.set(place_of(own), encode_call(call_));
    store_.set(arrival_of(own), "here");
    while (!store_.check(arrivals_)) {
      look();
      const auto begun = Clock::now();
      try {
        return store_.wait(arrivals_, kLookAtMeeting);
      } catch (const std::exception&) {
        if (Clock::now() < begun + kLookAtMeeting)
          throw;  // not a timeout: the store itself has failed
      }
    }
  }

 private:
  std::string arrival_of(int rank) const { return c10::str(topic_, "/", rank); }
  static std::string place_of(int rank) { return c10::str("new_group of rank ", rank); }

  /// Throws if a rank that is missing can't come any more.
  void look() {
    const auto verdict = topic_ + "/verdict";
    TORCH_CHECK_VALUE(!store_.check({verdict}), store_.get_to_str(verdict));
    std::erase_if(missing_, [&](int rank) { return store_.check({arrival_of(rank)}); });
    const auto& missing = missing_;
    for (const int rank : missing) {
      const auto elsewhere = call_that_waits_for_us(rank);
      if (!elsewhere) continue;
      const auto text = describe(rank, *elsewhere);
      store_.set(verdict, text);  // for those whom neither list keeps waiting
      TORCH_CHECK_VALUE(false, text);
    }
    const auto ended = who_cant_come(missing);
    TORCH_CHECK_WITH(DistBackendError,
                     missing.empty() || (ended.empty() && Clock::now() < deadline_),
                     "new_group: group '", name_of(call_), "': expected ", call_.ranks.size(),
                     " ranks within ", format_seconds(static_cast<double>(timeout_.count()) / 1e3),
                     ", rank ", context_.world.rank, " still misses ", format_ranks(missing),
                     ended.empty() ? "; every listed rank has to call it" : ended);
    if (!missing.empty() && is_late(since_) && !std::exchange(is_late_told_, true))
      tell_late(c10::str("rank ", context_.world.rank), format_ranks(missing), since_,
                "new_group, group '" + name_of(call_) + "'", deadline_);
  }

  std::string who_cant_come(const std::vector<int>& missing) {
    const auto& processes = context_.world.processes;
    for (const int rank : missing) {
      if (processes.empty() || !processes[rank]) continue;
      const auto stopped = processes[rank]->find_stop(c10::str("rank ", rank), "");
      if (!stopped && !processes[rank]->has_exited()) continue;
      if (store_.check({arrival_of(rank)})) continue;  // it came before that
      if (stopped) return "; " + *stopped;
      return c10::str("; rank ", rank, " (process ", processes[rank]->pid(),
                      ") has ended; look at its own output for the cause");
    }
    return {};
  }

  /// What `rank` waits in, if this rank would have to join it and has not.
  std::optional<GroupCall> call_that_waits_for_us(int rank) {
    if (!store_.check({place_of(rank)})) return std::nullopt;
    auto theirs = decode_call(store_.get_to_str(place_of(rank)));
    if (std::ranges::count(theirs.ranks, context_.world.rank) == 0) return std::nullopt;
    const std::lock_guard lock(context_.mutex);
    const auto made = context_.group_counts.find(theirs.ranks);
    const bool was_joined = made != context_.group_counts.end() && made->second > theirs.count;
    return was_joined ? std::nullopt : std::optional(theirs);
  }

  std::string describe(int rank, const GroupCall& theirs) const {
    const auto call_of = [](int caller, const GroupCall& call) {
      return c10::str("rank ", caller, " calls it for ", list_text(call));
    };
    const auto own = call_of(context_.world.rank, call_);
    const auto other = call_of(rank, theirs);
    const bool first = context_.world.rank < rank;
    return c10::str("new_group: the ranks disagree: ", first ? own : other, ", ",
                    first ? other : own,
                    "; every listed rank must call it with the same ranks in the same order");
  }

  Context& context_;
  const GroupCall& call_;
  c10d::Store& store_;
  const std::string topic_;
  const milliseconds timeout_;
  const Clock::time_point since_ = Clock::now();
  const Clock::time_point deadline_;
  bool is_late_told_ = false;
  std::vector<std::string> arrivals_;  // keys, as call_.ranks
  std::vector<int> missing_;           // at the last look
};

}  // namespace

std::string name_of(const GroupCall& call) {
  constexpr size_t kShown = 16;
  const auto& ranks = call.ranks;
  std::string text = "ranks";
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text.append(i == 0 ? " " : ",").append(std::to_string(ranks[i]));
  if (ranks.size() > kShown) {
    size_t hash = 0;
    for (const int rank : ranks) hash = hash * 1000003 + static_cast<size_t>(rank);
    text += c10::str(",... (", ranks.size(), " in all, list ", hash, ")");
  }
  return call.count == 0 ? text : c10::str(text, " #", call.count + 1);
}

void meet_for_group(Context& context, const GroupCall& call, milliseconds timeout) {
  if (call.ranks.size() > 1) GroupMeeting(context, call, timeout).run();
}

}  // namespace tessera::comm
