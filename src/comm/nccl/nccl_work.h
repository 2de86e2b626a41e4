#pragma once

#include "comm/argument_checks.h"
#include "comm/backends.h"
#include "comm/call_check.h"
#include "comm/gloo/group_log.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace tessera::comm::nccl {

using gloo::CallRecordPtr;
using gloo::Clock;
using gloo::GroupLog;

// Note [watching NCCL]
// A kernel of NCCL's waits for its peers without an end, and the host learns of it when it next
// waits for the device. So a thread per group looks at the calls that have not completed. It gives
// up if a peer's process has ended or is stopped for too long, a host is lost, another rank has
// given up, or the call's timeout is over: it notes the cause, with rank, group, call and sequence
// number, and aborts the communicator, which ends the kernel. Whoever waits for a call, or makes
// another, gets the error; what the aborted calls left in their tensors is undefined. Ranks tell
// each other through the store how far they have come, but only those that stand still: that is how
// a timeout can name the ranks that are missing. c10d's own watchdog would end the process; here it
// only tells which calls completed.

/// Looks after the calls of one rank in one group. See Note [watching NCCL].
class Watchdog {
 public:
  /// `give_up` ends what is under way; called once, at most, on the thread of the watch.
  Watchdog(const BackendRequest& request, std::shared_ptr<GroupLog> log,
           std::function<void()> give_up);
  ~Watchdog() { close(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// A call that goes on until its state says otherwise. `peer`: of a send or receive, else -1.
  void add(CallRecordPtr issue, std::chrono::milliseconds timeout, int peer);
  /// The error for a call that failed for `reason`, in c10d's words.
  std::exception_ptr fail(gloo::CallRecord& issue, const std::string& reason);
  /// Whether all calls complete within `grace`.
  bool await_idle(std::chrono::milliseconds grace);
  /// Tells the peers that this rank leaves, and ends the thread.
  void close();

 private:
  struct Pending {
    CallRecordPtr issue;
    Clock::time_point deadline;
    int peer;
  };

  void run();
  void tell_progress();
  std::optional<std::string> find_problem(const Pending& call);
  std::optional<std::string> find_ended(Clock::duration age) const;
  std::optional<std::string> find_given_up();
  std::string explain_timeout(const Pending& call);
  /// What the ranks have told of their calls with the number of this one.
  struct Told {
    std::vector<RankCall> calls;
    std::vector<int> missing;  // ranks that have not come to it
    std::string last_calls;    // of those
  };
  Told ask_ranks(const gloo::CallRecord& issue) const;
  std::optional<std::string> find_mismatch(const gloo::CallRecord& issue);
  std::optional<Pending> oldest();
  std::string key(const char* topic, int rank) const;

  const int rank_;
  const int size_;
  const Processes processes_;
  const std::vector<int> world_ranks_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Heartbeat> heartbeat_;  // until it is closed
  const std::shared_ptr<GroupLog> log_;
  std::function<void()> give_up_;  // until it is closed

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Pending> pending_;
  CallRecordPtr last_;  // of the collectives
  bool closed_ = false;

  CallRecordPtr told_, seen_;  // by the thread alone
  Clock::time_point seen_since_;
  std::thread thread_;
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// c10d's work with errors that tell what happened where. wait() makes the current stream wait, as
/// c10d's does, and throws if the group has failed by then.
class NcclWork final : public c10d::Work {
 public:
  /// `outputs`: what the caller passed, if NCCL works on other views of it.
  NcclWork(c10d::OpType type, WorkPtr inner, CallRecordPtr issue, std::shared_ptr<GroupLog> log,
           std::shared_ptr<Watchdog> watch, std::optional<Tensors> outputs);

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override { inner_->synchronize(); }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  std::vector<at::Tensor> result() override;
  FuturePtr getFuture() override;
  FuturePtr getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return issue_->sequence; }
  int sourceRank() const override { return inner_->sourceRank(); }

 private:
  void throw_if_failed() const;

  const WorkPtr inner_;
  const CallRecordPtr issue_;
  const std::shared_ptr<GroupLog> log_;
  const std::shared_ptr<Watchdog> watch_;
  const std::optional<Tensors> outputs_;
};

}  // namespace tessera::comm::nccl
