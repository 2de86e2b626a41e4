#include "comm/shm/executor.h"

#include <tessera/trace.h>

#include "base/text.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>

namespace tessera::comm::shm {

ShmWork::ShmWork(int rank, Parts parts, std::shared_ptr<Executor> executor)
    : Work(rank, parts.type, parts.title, parts.inputs),
      parts_(std::move(parts)),
      executor_(std::move(executor)) {
  auto& channel = executor_->channel();
  for (const auto& collective : parts_.collectives) {
    records_.push_back(channel.record(collective->descriptor(), FlightEntry::Queued));
  }
}

bool ShmWork::is_done() const { return done_.load(std::memory_order_acquire); }

bool ShmWork::isCompleted() {
  if (!is_done()) {
    executor_->nudge();  // a caller that only polls must see it end
    return false;
  }
  if (parts_.device && !exception() && !parts_.device->has_ended()) return false;
  return std::all_of(parts_.messages.begin(), parts_.messages.end(),
                     [](auto& message) { return message->isCompleted(); });
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!is_done()) executor_->run_until_done(*this, timeout);
  {
    const std::lock_guard lock(mutex_);
    if (exception_) std::rethrow_exception(exception_);
  }
  if (parts_.device) parts_.device->join();
  for (const auto& message : parts_.messages) message->wait(timeout);
  return true;
}

std::string ShmWork::describe() const {
  const auto& first = parts_.collectives.front()->descriptor();
  // Field by field: the sequence number may be set this moment by the thread that runs it.
  return comm::describe({.sequence = sequence_.load(),
                         .kind = first.kind,
                         .dtype = first.dtype,
                         .reduce = first.reduce,
                         .root = first.root,
                         .bytes = first.bytes,
                         .function = first.function,
                         .note = first.note});
}

void ShmWork::abort() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "shm: a collective can't be aborted alone; shut the group down");
}

uint64_t ShmWork::getSequencenumber() const {
  return parts_.collectives.empty() ? 0 : parts_.collectives.front()->descriptor().sequence;
}

float ShmWork::getDuration() const {
  TORCH_CHECK(
      is_done(),
      "shm: getDuration: expected a completed collective, got one under way; wait() for it first");
  return std::chrono::duration<float, std::milli>(duration_).count();
}

bool ShmWork::has_started() const {
  for (const auto& collective : parts_.collectives) {
    if (!collective->has_started()) return false;
  }
  return true;
}

bool ShmWork::try_start(Channel& channel) {
  if (parts_.device && !parts_.device->is_on_host()) return false;
  for (auto& collective : parts_.collectives) {
    if (collective->has_started()) continue;
    if (!collective->starts_at_once(channel) || !channel.can_start_without_waiting()) return false;
    collective->start(channel);
  }
  return true;
}

void ShmWork::run(Channel& channel) {
  std::exception_ptr exception;
  const auto begun = Clock::now();
  size_t completed = 0;
  try {
    const c10::OptionalStreamGuard guard(parts_.device ? std::optional(parts_.device->stream())
                                                       : std::nullopt);
    if (parts_.device) parts_.device->await_host();
    for (size_t i = 0; i < parts_.collectives.size(); ++i) {
      auto& collective = *parts_.collectives[i];
      channel.check_usable(name_of(collective.descriptor().kind));
      const auto sequence =
          collective.has_started() ? collective.descriptor().sequence : channel.next_sequence();
      sequence_.store(sequence);
      channel.update(records_[i], sequence, FlightEntry::Running);
      collective.finish(channel);
      channel.update(records_[i], sequence, FlightEntry::Done);
      completed = i + 1;
    }
    if (parts_.afterwards) parts_.afterwards();
    if (parts_.device) parts_.device->end();
  } catch (...) {
    exception = std::current_exception();
    for (size_t i = completed; i < records_.size(); ++i) {
      channel.update(records_[i], parts_.collectives[i]->descriptor().sequence,
                     FlightEntry::Failed);
    }
  }
  duration_ = Clock::now() - begun;
  end(exception);
}

void ShmWork::end(std::exception_ptr exception) {
  parts_.afterwards = nullptr;
  parts_.kept.clear();
  const std::lock_guard lock(future_mutex_);
  finish(exception);
  done_.store(true, std::memory_order_release);
}

void ShmWork::tell_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::intrusive_ptr<c10::ivalue::Future> result;
  {
    const std::lock_guard lock(future_mutex_);
    if (!future_told_) future = future_;
    if (!result_told_) result = future_result_;
    future_told_ = future_told_ || future;
    result_told_ = result_told_ || result;
  }
  if (future) {
    // The future records what its readers' streams have to wait for on the current one.
    const c10::OptionalStreamGuard guard(parts_.device ? std::optional(parts_.device->stream())
                                                       : std::nullopt);
    exception_ ? future->setError(exception_) : future->markCompleted(c10::IValue(parts_.outputs));
  }
  if (result) {
    result->markCompleted(c10::IValue(static_cast<int64_t>(
        exception_ ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS)));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  {
    const std::lock_guard lock(future_mutex_);
    if (!future_)
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), devices_of(parts_.device));
  }
  is_done() ? tell_future() : executor_->nudge();
  if (parts_.messages.empty()) return future_;
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> all(
      c10::FutureType::create(future_->elementType()));
  all.push_back(future_);
  for (const auto& message : parts_.messages) all.push_back(message->getFuture());
  std::vector<c10::Device> devices;
  for (const c10::intrusive_ptr<c10::ivalue::Future>& one : all)
    if (devices.empty()) devices = one->devices();  // a rank's tensors are on one
  auto whole = c10::make_intrusive<c10::ivalue::Future>(future_->elementType(), devices);
  c10::collectAll(all)->addCallback(
      [whole, all, outputs = parts_.outputs](c10::ivalue::Future& ended) {
        if (ended.hasError()) return whole->setError(ended.exception_ptr());
        // The current stream waits for each, and who waits for the whole waits for it.
        for (const c10::intrusive_ptr<c10::ivalue::Future>& one : all) one->wait();
        whole->markCompleted(c10::IValue(outputs));
      });
  return whole;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFutureResult() {
  {
    const std::lock_guard lock(future_mutex_);
    if (!future_result_)
      future_result_ = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  }
  is_done() ? tell_future() : executor_->nudge();
  return future_result_;
}

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
