#include "comm/nccl/nccl_work.h"

#include <tessera/trace.h>

#include "base/error_text.h"
#include "base/text.h"
#include "comm/heartbeat.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <iostream>

namespace tessera::comm::nccl {
namespace {

using State = gloo::CallRecord::State;
using std::chrono::milliseconds;

constexpr milliseconds kLook(250);
// What takes less needs no explanation.
constexpr std::chrono::seconds kSlow(1);
// A peer that has left may have done its part before this rank's device came to its own.
constexpr std::chrono::seconds kAfterLeaving(10);
// Between the end of a connection and that of the process at its other end, or until a rank that
// stands still has told its call.
constexpr milliseconds kEnding(2000);

constexpr const char* kGivenUp = "nccl/given_up";

bool runs(const CallRecordPtr& issue) { return issue->state == State::Running; }

bool are_alike(const std::vector<RankCall>& calls) {
  return std::ranges::all_of(calls,
                             [&](const auto& other) { return other.call == calls.front().call; });
}

}  // namespace

Watchdog::Watchdog(const BackendRequest& request, std::shared_ptr<GroupLog> log,
                   std::function<void()> give_up)
    : rank_(request.rank),
      size_(request.size),
      processes_(request.processes),
      world_ranks_(request.world_ranks),
      store_(request.store),
      heartbeat_(request.heartbeat),
      log_(std::move(log)),
      give_up_(std::move(give_up)) {
  if (size_ > 1) thread_ = std::thread([this] { run(); });
}

std::string Watchdog::key(const char* topic, int rank) const {
  return c10::str("nccl/", topic, "/", rank);
}

void Watchdog::add(CallRecordPtr issue, milliseconds timeout, int peer) {
  const std::lock_guard lock(mutex_);
  while (!pending_.empty() && !runs(pending_.front().issue)) pending_.pop_front();
  if (peer < 0) last_ = issue;
  const auto deadline = issue->since + timeout;
  pending_.push_back({.issue = std::move(issue), .deadline = deadline, .peer = peer});
}

std::optional<Watchdog::Pending> Watchdog::oldest() {
  const std::lock_guard lock(mutex_);
  std::erase_if(pending_, [](const auto& call) { return !runs(call.issue); });
  if (pending_.empty()) return std::nullopt;
  return pending_.front();
}

bool Watchdog::await_idle(milliseconds grace) {
  const auto end = Clock::now() + grace;
  while (oldest()) {
    if (Clock::now() >= end || log_->has_failed()) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

void Watchdog::close() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  changed_.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) return thread_.detach();
  if (thread_.joinable()) thread_.join();
  heartbeat_.reset();
  give_up_ = nullptr;
  try {
    store_->set(key("left", rank_), "yes");
  } catch (const std::exception&) {
    // The store is gone: so is whoever would ask.
  }
}

void Watchdog::run() {
  c10::setThreadName("tessera_nccl");
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [&] { return closed_; })) {
    lock.unlock();
    try {
      tell_progress();
    } catch (const std::exception&) {
      // Without the store nobody is told; the calls themselves do not need it.
    }
    const auto call = oldest();
    const bool is_slow = call && Clock::now() - call->issue->since >= kSlow;
    if (const auto problem = is_slow ? find_problem(*call) : std::nullopt) {
      const auto error = log_->fail(*call->issue, std::make_exception_ptr(gloo::Cause(*problem)));
      // Perhaps nobody waits for a call any more.
      std::cerr << "tessera: " << text_of(error) << std::endl;
      try {
        store_->compareSet(kGivenUp, "", c10::str(log_->label(rank_), ": ", *problem));
      } catch (const std::exception&) {
        // The others find out by themselves.
      }
      const auto give_up = give_up_;
      return give_up();
    }
    lock.lock();
  }
}

void Watchdog::tell_progress() {
  CallRecordPtr last;
  {
    const std::lock_guard lock(mutex_);
    last = last_;
  }
  if (!last || last == told_) return;
  if (last != seen_) {
    seen_ = last;
    seen_since_ = Clock::now();
  } else if (Clock::now() - seen_since_ >= kSlow) {
    told_ = last;
    store_->set(key("at", rank_), c10::str(last->sequence, " ", last->what));
  }
}

std::optional<std::string> Watchdog::find_problem(const Pending& call) {
  if (auto ended = find_ended(Clock::now() - call.issue->since)) return ended;
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    const bool is_teller = rank_ == (rank == 0 ? 1 : 0);  // one is enough
    const auto problem = processes_[rank]
                             ? processes_[rank]->find_stop(log_->label(static_cast<int>(rank)),
                                                           is_teller ? log_->label(rank_) : "")
                             : std::nullopt;
    if (problem) return problem;
  }
  if (auto lost = heartbeat_ ? heartbeat_->find_lost(world_ranks_) : std::nullopt) return lost;
  try {
    if (auto given_up = find_given_up()) return given_up;
    if (Clock::now() >= call.deadline) return explain_timeout(call);
  } catch (const std::exception& error) {
    if (Clock::now() < call.deadline) return std::nullopt;
    return c10::str(
        "timed out after ",
        format_seconds(std::chrono::duration<double>(Clock::now() - call.issue->since).count()),
        ", and the store that knows who is missing can't be reached");
  }
  return std::nullopt;
}

std::optional<std::string> Watchdog::find_ended(Clock::duration age) const {
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    if (!processes_[rank] || !processes_[rank]->has_exited()) continue;
    const int peer = static_cast<int>(rank);
    bool has_left = false;
    try {
      has_left = store_->check({key("left", peer)});
    } catch (const std::exception&) {
      // Served by the rank that has ended.
    }
    if (has_left && age < kAfterLeaving) continue;
    return c10::str(log_->label(peer), " (process ", processes_[rank]->pid(), ") has ended; its ",
                    "own output has the cause if it failed, and if it ended well it did not make ",
                    "this call");
  }
  return std::nullopt;
}

std::optional<std::string> Watchdog::find_given_up() {
  if (!store_->check({kGivenUp})) return std::nullopt;
  return c10::str("a peer has given up, ", printable(store_->get_to_str(kGivenUp)));
}

std::string Watchdog::explain_timeout(const Pending& call) {
  const auto waited =
      format_seconds(std::chrono::duration<double>(Clock::now() - call.issue->since).count());
  constexpr const char* kRemedy = "; raise the group's timeout if the ranks are only slow";
  if (call.peer >= 0)
    return c10::str("timed out after ", waited, " of waiting for ", log_->label(call.peer),
                    kRemedy);
  const auto told = ask_ranks(*call.issue);
  if (!told.missing.empty())
    return c10::str("timed out after ", waited, " of waiting for ", format_ranks(told.missing),
                    ", which did not make this call", told.last_calls, kRemedy);
  if (!are_alike(told.calls))
    return c10::str("timed out after ", waited, ": ", describe_disagreement(told.calls));
  return c10::str("timed out after ", waited, " although all ranks have made this call: a device ",
                  "is busy or the network does not carry it; NCCL_DEBUG=INFO tells more", kRemedy);
}

Watchdog::Told Watchdog::ask_ranks(const gloo::CallRecord& issue) const {
  Told told;
  for (int peer = 0; peer < size_; ++peer) {
    const bool is_known = peer == rank_ || store_->check({key("at", peer)});
    const auto text = peer == rank_ ? c10::str(issue.sequence, " ", issue.what)
                      : is_known    ? printable(store_->get_to_str(key("at", peer)))
                                    : "0 none";
    const auto blank = text.find(' ');
    const auto what = blank == std::string::npos ? text : text.substr(blank + 1);
    const auto sequence = std::strtoull(text.c_str(), nullptr, 10);
    if (sequence == issue.sequence) told.calls.push_back({.rank = log_->label(peer), .call = what});
    if (sequence >= issue.sequence) continue;
    told.missing.push_back(peer);
    told.last_calls += c10::str("; the last call of ", log_->label(peer), " is ", what);
  }
  return told;
}

std::optional<std::string> Watchdog::find_mismatch(const gloo::CallRecord& issue) {
  {
    const std::lock_guard lock(mutex_);
    const bool is_collective = std::ranges::any_of(
        pending_, [&](const auto& call) { return call.issue.get() == &issue && call.peer < 0; });
    if (!is_collective) return std::nullopt;  // messages are numbered by themselves
  }
  try {
    const auto told = ask_ranks(issue);
    if (!are_alike(told.calls)) return describe_disagreement(told.calls);
  } catch (const std::exception&) {
    // Without the store nobody knows.
  }
  return std::nullopt;
}

std::exception_ptr Watchdog::fail(gloo::CallRecord& issue, const std::string& reason) {
  // The error is often a peer's end, and the connection ends before its process.
  const auto end = Clock::now() + kEnding;
  auto problem = find_ended(kAfterLeaving);
  while (!problem && !log_->has_failed() && Clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(20));
    problem = find_ended(kAfterLeaving);
  }
  if (!problem) {
    problem = "NCCL failed: " + reason;
    // NCCL takes a message of another length than it expects for a broken connection.
    if (const auto mismatch = find_mismatch(issue)) *problem += "; " + *mismatch;
  }
  return log_->fail(issue, std::make_exception_ptr(gloo::Cause(*problem)));
}

NcclWork::NcclWork(c10d::OpType type, WorkPtr inner, CallRecordPtr issue,
                   std::shared_ptr<GroupLog> log, std::shared_ptr<Watchdog> watch,
                   std::optional<Tensors> outputs)
    : Work(/*rank=*/-1, type),
      inner_(std::move(inner)),
      issue_(std::move(issue)),
      log_(std::move(log)),
      watch_(std::move(watch)),
      outputs_(std::move(outputs)) {}

void NcclWork::throw_if_failed() const {
  if (const auto failure = log_->failure()) std::rethrow_exception(failure);
}

bool NcclWork::wait(std::chrono::milliseconds timeout) {
  const Span span(SpanKind::Communication, log_->span_name());
  throw_if_failed();
  try {
    inner_->wait(timeout);
  } catch (...) {
    std::rethrow_exception(watch_->fail(*issue_, text_of(std::current_exception())));
  }
  throw_if_failed();
  return true;
}

bool NcclWork::isSuccess() const { return !exception() && inner_->isCompleted(); }

std::exception_ptr NcclWork::exception() const {
  const auto failure = log_->failure();
  return failure ? failure : inner_->exception();
}

std::vector<at::Tensor> NcclWork::result() { return outputs_ ? *outputs_ : inner_->result(); }

FuturePtr NcclWork::getFuture() {
  if (!outputs_) return inner_->getFuture();
  return inner_->getFuture()->then(
      [outputs = *outputs_](c10::ivalue::Future&) { return c10::IValue(outputs); },
      c10::ListType::create(c10::TensorType::get()));
}

}  // namespace tessera::comm::nccl
