#include "comm/shm/executor.h"

#include <tessera/trace.h>

#include "base/text.h"

#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>

namespace tessera::comm::shm {

namespace {

// A peer that has these under way needs slots and descriptors again after as many; if this rank is
// busy elsewhere, with that peer, it must not be what the peer waits for.
constexpr size_t kMostUnfinished = std::min(kSlots, kDescriptors) - 1;

}  // namespace

Executor::~Executor() { close(); }

bool Executor::holds_peers_up() const {
  size_t unfinished = 0;
  for (const auto& work : queue_) unfinished += work->collectives().size();
  return unfinished > kMostUnfinished;
}

bool Executor::starts_now(ShmWork& work) {
  // Collectives start in the order of their issue: only if all before it have, and nobody uses the
  // channel.
  if (running_ || channel_.has_failed()) return false;
  if (!std::all_of(queue_.begin(), queue_.end(),
                   [](const auto& queued) { return queued->has_started(); }))
    return false;
  return work.try_start(channel_);
}

void Executor::submit(const c10::intrusive_ptr<ShmWork>& work, bool wait) {
  Lock lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, "shm: group '", channel_.group_name(),
                   "' has been shut down");
  const bool started = !wait && starts_now(*work);
  queue_.push_back(work);
  if (wait) {
    lock.unlock();
    run_until_done(*work, kNoTimeout);
    return;
  }
  if (started && !holds_peers_up()) return;
  worker_wanted_ = true;
  if (!worker_.joinable()) worker_ = std::thread([this] { work_loop(); });
  changed_.notify_all();
}

void Executor::run_front(Lock& lock) {
  const auto work = queue_.front();
  queue_.pop_front();
  running_ = true;
  run_ = work.get();
  lock.unlock();
  work->run(channel_);
  lock.lock();
  running_ = false;
  run_ = nullptr;
  ++told_;
  if (queue_.empty()) worker_wanted_ = false;
  changed_.notify_all();
  lock.unlock();
  work->tell_future();
  lock.lock();
  --told_;
  changed_.notify_all();  // who waits gets the lock when this reference has gone
}

void Executor::await_released() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return told_ == 0 && (run_ == nullptr || !run_->is_done()); });
}

void Executor::run_until_done(ShmWork& work, std::chrono::milliseconds timeout) {
  const auto& first = work.collectives().front()->descriptor();
  const Span span(SpanKind::Communication, name_of(first.kind), static_cast<int64_t>(first.bytes));
  if (timeout > kNoTimeout) return wait_until_done(work, timeout);
  Lock lock(mutex_);
  while (!work.is_done()) !running_ && !queue_.empty() ? run_front(lock) : changed_.wait(lock);
}

void Executor::wait_until_done(ShmWork& work, std::chrono::milliseconds timeout) {
  nudge();
  Lock lock(mutex_);
  if (changed_.wait_for(lock, std::min(timeout, kLongestTimeout), [&] { return work.is_done(); }))
    return;
  TORCH_CHECK_WITH(DistBackendError, false, "shm: wait: ", work.describe(), " in group '",
                   channel_.group_name(), "' on ", channel_.label(channel_.rank()),
                   " is not complete after ",
                   format_seconds(static_cast<double>(timeout.count()) / 1e3),
                   "; it is still under way: wait longer, or look where the other ranks are");
}

void Executor::nudge() {
  const Lock lock(mutex_);
  if (queue_.empty() || closed_) return;
  worker_wanted_ = true;
  if (!worker_.joinable()) worker_ = std::thread([this] { work_loop(); });
  changed_.notify_all();
}

void Executor::work_loop() {
  c10::setThreadName("tessera_shm");
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock,
                  [this] { return closed_ || (worker_wanted_ && !running_ && !queue_.empty()); });
    if (closed_) return;
    run_front(lock);
  }
}

void Executor::close() {
  if (!channel_.is_own_process())
    return;  // forked: the worker is not here, and the lock may be held for ever
  Lock lock(mutex_);
  if (closed_) return;
  while (running_ || !queue_.empty()) running_ ? changed_.wait(lock) : run_front(lock);
  closed_ = true;
  changed_.notify_all();
  lock.unlock();
  if (worker_.joinable()) worker_.join();
}

}  // namespace tessera::comm::shm
