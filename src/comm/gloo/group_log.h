#pragma once

#include "comm/backends.h"
#include "comm/call_check.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::comm::gloo {

using Clock = std::chrono::steady_clock;

/// The cause of the error of what was under way when this rank left the group.
inline constexpr const char* kLeft = "this rank has shut the group down";

/// Why a collective failed, in plain words. `for_all`: every rank says the same.
class Cause : public std::runtime_error {
 public:
  explicit Cause(const std::string& text, bool for_all = false)
      : runtime_error(text), for_all(for_all) {}
  const bool for_all;
};

/// One call of a collective on this rank.
struct CallRecord {
  enum class State { Running, Done, Failed };
  std::string what;  // "all_reduce #7 (1024 float32, 4 KiB, sum)"
  uint64_t sequence = 0;
  Clock::time_point since = Clock::now();
  std::atomic<State> state = State::Running;
};
using CallRecordPtr = std::shared_ptr<CallRecord>;

/// What a group of gloo or nccl did last and whether it still works. Its collectives share it and
/// may outlive the group.
class GroupLog {
 public:
  /// `backend` starts the errors.
  explicit GroupLog(const BackendRequest& request, const char* backend = "gloo");

  /// Throws if an earlier collective failed or the group was shut down.
  void check_usable(const std::string& what) const;
  bool has_failed() const;
  /// The error that made the group unusable; null: there was none.
  std::exception_ptr failure() const;
  void close();

  /// The backend is at work on `issue` until leave(); cancel_all() calls `cancel` of those it is
  /// still at work on, once.
  void enter(const CallRecordPtr& issue, std::function<void()> cancel);
  void leave(const CallRecordPtr& issue);
  void cancel_all();
  /// Whether the backend has nothing left to do, now or within `grace`.
  bool await_idle(std::chrono::milliseconds grace);

  /// Since when a call has not completed; none: all have.
  std::optional<Clock::time_point> waits_since() const;
  /// A wait for one peer's word, until end_wait().
  void begin_wait(int peer, const Descriptor& call, Clock::time_point deadline);
  void end_wait();
  /// Tells of that wait if it is long, once.
  void tell_late() const;
  /// What is under way, or comes, fails because of `cause`, whatever the backend says of it.
  void blame(std::string cause);

  CallRecordPtr add(std::string what, uint64_t sequence);
  /// The error to give out for `cause`: a DistBackendError with operation, sequence number, group,
  /// rank and cause. The first one makes the group unusable, is what all others say, and writes the
  /// last collectives to standard error.
  std::exception_ptr fail(CallRecord& issue, const std::exception_ptr& cause);
  /// The same for a wait that ended before the collective did, which may still complete.
  [[noreturn]] void throw_impatient(const CallRecord& issue) const;
  std::string recent() const;
  /// For spans: collectives of different groups are to be told apart. Valid for ever.
  const char* span_name() const { return span_name_; }

  /// " in group 'dp' on rank 1 (world rank 3)".
  const std::string& place() const { return place_; }
  /// "rank 1", with the world's number where it differs.
  std::string label(int rank) const;
  /// `failure` of gloo in plain words, if it waited for `who` since `since`.
  static std::string explain(const std::exception_ptr& failure, const std::string& who,
                             Clock::time_point since);

 private:
  std::string describe(const CallRecord& issue, const std::string& what) const;

  struct Wait {
    int peer;
    Descriptor call;
    Clock::time_point since, deadline;
    bool is_told = false;
  };

  const char* const backend_;
  const int rank_;
  const std::string group_name_;
  const std::vector<int> world_ranks_;
  std::string place_;
  const char* span_name_;
  mutable std::mutex mutex_;
  std::string failure_;
  std::string cause_;
  bool closed_ = false;
  std::map<CallRecordPtr, std::function<void()>> under_way_;
  std::condition_variable left_;
  std::deque<CallRecordPtr> issues_;
  mutable std::optional<Wait> wait_;
};

}  // namespace tessera::comm::gloo
