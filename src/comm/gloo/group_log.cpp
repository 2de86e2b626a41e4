#include "comm/gloo/group_log.h"

#include "base/error_text.h"
#include "base/text.h"
#include "comm/diagnostics.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <iostream>
#include <set>

namespace tessera::comm::gloo {
namespace {

constexpr size_t kRemembered = 64;

double seconds_since(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

/// gloo starts its texts with "[/path/file.cc:12] " and ends some with advice.
std::string without_ornaments(std::string text) {
  const auto source = text.find(".cc:");
  const auto bracket = source == std::string::npos ? source : text.find("] ", source);
  if (text.starts_with("[/") && bracket != std::string::npos) text = text.substr(bracket + 2);
  return text.substr(0, text.find(". This is typically"));
}

std::exception_ptr make_error(const std::string& message) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message));
}

/// Spans outlive the groups that they are of.
const char* interned(const std::string& name) {
  static std::mutex mutex;
  static auto& names = *new std::set<std::string>();
  const std::lock_guard lock(mutex);
  return names.insert(name).first->c_str();
}

}  // namespace

GroupLog::GroupLog(const BackendRequest& request, const char* backend)
    : backend_(backend),
      rank_(request.rank),
      group_name_(request.group_name),
      world_ranks_(request.world_ranks),
      span_name_(interned(c10::str(backend, " (", request.group_name, ")"))) {
  place_ = c10::str(" in group '", request.group_name, "' on ", label(request.rank));
}

std::string GroupLog::label(int rank) const {
  const int in_world = rank < static_cast<int>(world_ranks_.size()) ? world_ranks_[rank] : rank;
  const auto text = "rank " + std::to_string(rank);
  return in_world == rank ? text : c10::str(text, " (world rank ", in_world, ")");
}

std::string GroupLog::explain(const std::exception_ptr& failure, const std::string& who,
                              Clock::time_point since) {
  const auto text = without_ornaments(text_of(failure));
  const auto waited = format_seconds(seconds_since(since));
  if (text.find("imed out") != std::string::npos) {
    return c10::str("timed out after ", waited, " of waiting for ", who,
                    "; raise the group's timeout if the ranks are only slow");
  }
  if (text.find("losed") != std::string::npos || text.find("reset") != std::string::npos) {
    return c10::str(who, " has ended or its connection broke; its own output has the cause if it ",
                    "failed, and if it ended well it did not make this call");
  }
  if (text == kLeft) return c10::str("given up after ", waited, ": ", kLeft);
  return c10::str("gloo failed after ", waited, ": ", text);
}

std::string GroupLog::describe(const CallRecord& issue, const std::string& what) const {
  return c10::str(backend_, ": ", issue.what, place_, ": ", what);
}

void GroupLog::check_usable(const std::string& what) const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), backend_, ": ", what, place_,
                   ": the group can't be used after an earlier error; end this rank, or shut ",
                   "down and init again. The error was: ", failure_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, backend_, ": ", what, place_,
                   ": the group was shut down; init again or make a new group");
}

bool GroupLog::has_failed() const {
  const std::lock_guard lock(mutex_);
  return !failure_.empty();
}

std::exception_ptr GroupLog::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_.empty() ? nullptr : make_error(failure_);
}

void GroupLog::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

void GroupLog::enter(const CallRecordPtr& issue, std::function<void()> cancel) {
  const std::lock_guard lock(mutex_);
  under_way_.emplace(issue, std::move(cancel));
}

void GroupLog::leave(const CallRecordPtr& issue) {
  std::function<void()>
      cancel;  // may own the last reference to a work: not to be freed under the lock
  const std::lock_guard lock(mutex_);
  cancel = std::exchange(under_way_[issue], nullptr);
  under_way_.erase(issue);
  left_.notify_all();
}

void GroupLog::cancel_all() {
  std::vector<std::function<void()>> cancels;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [issue, cancel] : under_way_) {
      if (cancel) cancels.push_back(std::exchange(cancel, nullptr));
    }
  }
  for (const auto& cancel : cancels) cancel();
}

bool GroupLog::await_idle(std::chrono::milliseconds grace) {
  std::unique_lock lock(mutex_);
  return left_.wait_for(lock, grace, [&] { return under_way_.empty(); });
}

std::optional<Clock::time_point> GroupLog::waits_since() const {
  const std::lock_guard lock(mutex_);
  for (const auto& issue : issues_) {
    if (issue->state == CallRecord::State::Running) return issue->since;
  }
  return std::nullopt;
}

void GroupLog::begin_wait(int peer, const Descriptor& call, Clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  wait_ = Wait{.peer = peer, .call = call, .since = Clock::now(), .deadline = deadline};
}

void GroupLog::end_wait() {
  const std::lock_guard lock(mutex_);
  wait_.reset();
}

void GroupLog::tell_late() const {
  const std::lock_guard lock(mutex_);
  if (!wait_ || !is_late(wait_->since) || std::exchange(wait_->is_told, true)) return;
  comm::tell_late(label(rank_), label(wait_->peer), wait_->since,
                  comm::describe(wait_->call) + " in group '" + group_name_ + "'", wait_->deadline);
}

void GroupLog::blame(std::string cause) {
  const std::lock_guard lock(mutex_);
  if (cause_.empty()) cause_ = std::move(cause);
}

CallRecordPtr GroupLog::add(std::string what, uint64_t sequence) {
  auto issue = std::make_shared<CallRecord>();
  issue->what = std::move(what);
  issue->sequence = sequence;
  const std::lock_guard lock(mutex_);
  issues_.push_back(issue);
  if (issues_.size() > kRemembered) issues_.pop_front();
  return issue;
}

std::exception_ptr GroupLog::fail(CallRecord& issue, const std::exception_ptr& cause) {
  std::string message;
  {
    const std::lock_guard lock(mutex_);
    message = cause_;
  }
  try {
    if (!message.empty()) throw Cause(message);
    std::rethrow_exception(cause);
  } catch (const Cause& known) {
    message = known.for_all ? c10::str(backend_, ": in group '", group_name_, "' ", known.what())
                            : describe(issue, known.what());
  } catch (...) {
    message = describe(issue, explain(cause, "a peer", issue.since));
  }
  issue.state = CallRecord::State::Failed;
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    is_first = failure_.empty() && !closed_;
    if (failure_.empty()) failure_ = message;
    message = failure_;
  }
  if (is_first) std::cerr << recent() << std::flush;  // the cause comes with the exception
  return make_error(message);
}

void GroupLog::throw_impatient(const CallRecord& issue) const {
  C10_THROW_ERROR(
      DistBackendError,
      describe(issue, c10::str("not complete ", format_seconds(seconds_since(issue.since)),
                               " after the call; a peer is late or missing")));
}

std::string GroupLog::recent() const {
  constexpr const char* kStates[] = {"running", "done", "failed"};
  std::string text = "tessera: recent collectives" + place_ + ":\n";
  const std::lock_guard lock(mutex_);
  for (const auto& issue : issues_) {
    text += c10::str("  ", issue->what, ": ", kStates[static_cast<int>(issue->state.load())],
                     ", issued ", format_seconds(seconds_since(issue->since)), " ago\n");
  }
  return text;
}

}  // namespace tessera::comm::gloo
