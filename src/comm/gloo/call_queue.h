#pragma once

#include "base/signal_block.h"
#include "comm/call_check.h"
#include "comm/gloo/work.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::comm::gloo {

/// c10d's gloo as it is. Its collectives call each other by name, so they are kept apart from ours,
/// which bear the same.
class Engine final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  void close_connections() {
    for (const auto& context : contexts_) context->closeConnections();
  }

  /// Calls `start` with this, one rank of the process at a time: c10d notes every collective in a
  /// table of the process, which libtorch 2.11 does not lock. To a peer that has gone, gloo writes
  /// without MSG_NOSIGNAL.
  template <class Start>
  auto start(Start start) {
    const SignalBlock block(SIGPIPE);
    const std::lock_guard lock(starting_);
    return start(*this);
  }

 private:
  inline static std::mutex starting_;
};

// Note [headers]
// gloo ends the process, hangs or mixes bytes up when its ranks do not call the same. So at the
// call every rank sends each other one message: its descriptor and, if all parts are small, its
// part of the data. When those of all peers are there the rank compares them, as every other does
// with the same outcome: an error on all, or the collective is done with what came along, or gloo
// is started on the data. One round, one message per peer, and none of it for gloo's own
// collectives where the data is small. Receives are posted ahead, so that a message goes out at
// once.

/// Tags of sends and receives are below it; it carries the headers.
inline constexpr int kHeaderTag = std::numeric_limits<int>::max();

/// What a call sends and receives, as bytes by peer, if the headers carry it; undefined: nothing.
struct Movement {
  Tensors sent;
  Tensors received;
};

/// A call from its issue until gloo works on it.
struct QueuedCall {
  c10::intrusive_ptr<CollectiveWork> work;
  Descriptor descriptor;
  std::vector<Movement> movements;
  std::vector<std::function<WorkPtr(Engine&)>> starts;  // of gloo's collectives
  std::vector<WorkPtr> sends;                           // of headers
  std::weak_ptr<void> held;                             // while gloo holds tensors of the call
  Clock::time_point deadline;
};

/// The calls of one rank in the order of issue, and the messages that go ahead of them. Whoever
/// waits for a call does what is to be done before it, and a thread of its own where nobody waits.
class CallQueue {
 public:
  CallQueue(const BackendRequest& request, c10::intrusive_ptr<Engine> engine, LogPtr log);
  ~CallQueue() { close(); }
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  /// Of a part of data that a header carries.
  size_t most_carried() const { return most_carried_; }
  /// Sends the headers and returns at once; unless in the background runs the call until it has
  /// started.
  void submit(QueuedCall call, bool in_background);
  /// Until the call is complete or gloo works on it.
  void run_until_started(const CollectiveWork& work);
  /// Returns when nothing that is complete is held here, or by gloo's threads, any more.
  void await_released();
  /// Until the peers have this rank's last headers, at most until `deadline`: they may still need
  /// them when this rank has gone.
  void flush(Clock::time_point deadline);
  /// Ends waits for peers: what is queued fails at once.
  void abort();
  /// Runs what is queued and ends the thread.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  /// A peer that has left is told of when it is waited for, not before: these do not throw.
  void post_receive(int peer) noexcept;
  void send_headers(QueuedCall& call);
  WorkPtr send(at::Tensor message, int peer) noexcept;
  void run_front(Lock& lock);
  /// Waits for the peers' headers and compares them; throws a Cause. Whether they carried the data.
  bool meet(QueuedCall& call);
  void await_peer(int peer, const QueuedCall& call);
  void deliver(const QueuedCall& call);
  void await_sent(const std::vector<WorkPtr>& sends, Clock::time_point deadline);
  /// Waits for a message that abort() can end.
  void await(const WorkPtr& message, Clock::time_point deadline);
  void work_loop();

  const int rank_;
  const int size_;
  const size_t most_carried_;
  c10::intrusive_ptr<Engine> engine_;
  const LogPtr log_;
  std::vector<at::Tensor> inboxes_;   // by peer
  std::vector<WorkPtr> receives_;     // by peer, into the inboxes
  std::vector<WorkPtr> sent_before_;  // the headers of the call before

  std::mutex abort_mutex_;
  WorkPtr awaited_;
  bool aborted_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<QueuedCall> queue_;
  bool running_ = false;  // somebody runs the front of the queue
  int ending_ = 0;        // calls that are being ended, and are held
  std::vector<std::pair<CallRecordPtr, std::weak_ptr<void>>>
      held_;  // of calls, while gloo holds some
  bool worker_wanted_ = false;
  bool closed_ = false;
  std::thread worker_;
};

}  // namespace tessera::comm::gloo
