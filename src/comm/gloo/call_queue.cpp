#include "comm/gloo/call_queue.h"

#include <tessera/trace.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace tessera::comm::gloo {
namespace {

// Carried twice through memory, so only where the latency of gloo's own collective costs more.
constexpr size_t kMostCarried = size_t{64} << 10;
constexpr size_t kMostCarriedByAll = size_t{128} << 10;

std::chrono::milliseconds time_left(Clock::time_point deadline) {
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()),
                  std::chrono::milliseconds(1));
}

// How long this rank's last headers may take when it fails.
constexpr std::chrono::seconds kLastSends(5);

size_t size_in_bytes(const at::Tensor& part) { return part.defined() ? part.nbytes() : 0; }

}  // namespace

CallQueue::CallQueue(const BackendRequest& request, c10::intrusive_ptr<Engine> engine, LogPtr log)
    : rank_(request.rank),
      size_(request.size),
      most_carried_(std::min(kMostCarried, kMostCarriedByAll / static_cast<size_t>(size_))),
      engine_(std::move(engine)),
      log_(std::move(log)),
      inboxes_(size_),
      receives_(size_) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    inboxes_[peer] =
        at::empty({static_cast<int64_t>(sizeof(Descriptor) + most_carried_)}, at::kByte);
    post_receive(peer);
  }
}

void CallQueue::post_receive(int peer) noexcept {
  receives_[peer] = nullptr;
  try {
    Tensors inbox{inboxes_[peer]};
    receives_[peer] =
        engine_->start([&](auto& gloo) { return gloo.recv(inbox, peer, kHeaderTag); });
  } catch (const std::exception&) {
  }
}

WorkPtr CallQueue::send(at::Tensor message, int peer) noexcept {
  try {
    Tensors messages{std::move(message)};
    return engine_->start([&](auto& gloo) { return gloo.send(messages, peer, kHeaderTag); });
  } catch (const std::exception&) {
    return nullptr;
  }
}

void CallQueue::send_headers(QueuedCall& call) {
  const bool carries = call.descriptor.largest_part <= most_carried_;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    size_t total = sizeof(Descriptor);
    for (const auto& movement : call.movements)
      total += carries ? size_in_bytes(movement.sent[peer]) : 0;
    auto message = at::empty({static_cast<int64_t>(total)}, at::kByte);
    auto* next = message.data_ptr<uint8_t>();
    std::memcpy(next, &call.descriptor, sizeof(Descriptor));
    next += sizeof(Descriptor);
    for (const auto& movement : call.movements) {
      const size_t bytes = carries ? size_in_bytes(movement.sent[peer]) : 0;
      if (bytes > 0) std::memcpy(next, movement.sent[peer].const_data_ptr(), bytes);
      next += bytes;
    }
    if (auto sent = send(std::move(message), peer)) call.sends.push_back(std::move(sent));
  }
}

void CallQueue::submit(QueuedCall call, bool in_background) {
  send_headers(call);
  Lock lock(mutex_);
  const auto work = call.work;
  queue_.push_back(std::move(call));
  if (!in_background) {
    lock.unlock();
    const Span span(SpanKind::Communication, log_->span_name());
    return run_until_started(*work);
  }
  worker_wanted_ = true;
  if (!worker_.joinable()) worker_ = std::thread([this] { work_loop(); });
  changed_.notify_all();
}

void CallQueue::await(const WorkPtr& message, Clock::time_point deadline) {
  {
    const std::lock_guard lock(abort_mutex_);
    TORCH_CHECK(!aborted_, kLeft);
    awaited_ = message;
  }
  TORCH_CHECK(message->wait(time_left(deadline)), kLeft);
}

void CallQueue::abort() {
  const std::lock_guard lock(abort_mutex_);
  aborted_ = true;
  if (awaited_) awaited_->abort();
}

void CallQueue::await_peer(int peer, const QueuedCall& call) {
  const auto since = Clock::now();
  log_->begin_wait(peer, call.descriptor, call.deadline);
  const auto no_longer = c10::make_scope_exit([&] { log_->end_wait(); });
  try {
    TORCH_CHECK(receives_[peer], "Connection closed by peer");
    await(receives_[peer], call.deadline);
  } catch (...) {
    throw Cause(GroupLog::explain(std::current_exception(), log_->label(peer), since));
  }
}

bool CallQueue::meet(QueuedCall& call) {
  std::vector<Descriptor> calls(size_);
  std::vector<std::string> labels;
  for (int peer = 0; peer < size_; ++peer) {
    labels.push_back(log_->label(peer));
    calls[peer] = call.descriptor;
    if (peer == rank_) continue;
    await_peer(peer, call);
    std::memcpy(&calls[peer], inboxes_[peer].const_data_ptr(), sizeof(Descriptor));
  }
  if (const auto text = find_disagreement(calls, labels)) {
    await_sent(call.sends, std::min(call.deadline, Clock::now() + kLastSends));
    throw Cause(*text, /*for_all=*/true);
  }
  const bool is_carried = std::all_of(calls.begin(), calls.end(), [&](const auto& descriptor) {
    return descriptor.largest_part <= most_carried_;
  });
  if (is_carried) deliver(call);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) post_receive(peer);
  }
  // Those of the call before: their receivers have come to this one.
  await_sent(std::exchange(sent_before_, std::move(call.sends)), call.deadline);
  return is_carried;
}

void CallQueue::await_sent(const std::vector<WorkPtr>& sends, Clock::time_point deadline) {
  try {
    for (const auto& send : sends) await(send, deadline);
  } catch (const std::exception&) {
    // Whoever did not get it has left; the next receive from it tells.
  }
}

void CallQueue::flush(Clock::time_point deadline) {
  Lock lock(mutex_);
  if (closed_ || !changed_.wait_until(lock, deadline, [&] { return !running_; })) return;
  await_sent(std::exchange(sent_before_, {}), deadline);
}

void CallQueue::deliver(const QueuedCall& call) {
  for (int peer = 0; peer < size_; ++peer) {
    const auto* next =
        peer == rank_
            ? nullptr
            : static_cast<const uint8_t*>(inboxes_[peer].const_data_ptr()) + sizeof(Descriptor);
    for (const auto& movement : call.movements) {
      const auto& to = movement.received[peer];
      const size_t bytes = size_in_bytes(to);
      if (bytes == 0) continue;
      const auto* from = peer == rank_
                             ? static_cast<const uint8_t*>(movement.sent[rank_].const_data_ptr())
                             : std::exchange(next, next + bytes);
      if (to.data_ptr() != from) std::memcpy(to.data_ptr(), from, bytes);
    }
  }
}

void CallQueue::run_front(Lock& lock) {
  auto call = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  lock.unlock();
  std::exception_ptr error;
  std::vector<WorkPtr> parts;
  try {
    if (log_->has_failed()) throw Cause("an earlier collective failed");
    if (!meet(call)) {
      for (auto& start : call.starts) parts.push_back(engine_->start(std::move(start)));
    }
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  running_ = false;
  call.work->mark_started();
  if (queue_.empty()) worker_wanted_ = false;
  ++ending_;
  std::erase_if(held_, [](const auto& call) { return call.second.expired(); });
  held_.emplace_back(call.work->issue(), call.held);
  changed_.notify_all();
  lock.unlock();
  // With no role held: callbacks may issue collectives and wait for them.
  error ? call.work->end(error) : CollectiveWork::follow(call.work, parts);
  lock.lock();
  --ending_;
  changed_.notify_all();  // who waits gets the lock when this reference has gone
}

void CallQueue::await_released() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return ending_ == 0; });
  const auto calls = held_;
  lock.unlock();
  for (const auto& [issue, held] : calls) {
    // A thread of gloo's lets go of what it has ended as its next step, of which nobody is told.
    while (issue->state == CallRecord::State::Done && !held.expired()) std::this_thread::yield();
  }
}

void CallQueue::run_until_started(const CollectiveWork& work) {
  Lock lock(mutex_);
  while (!work.has_started()) !running_ && !queue_.empty() ? run_front(lock) : changed_.wait(lock);
}

void CallQueue::work_loop() {
  c10::setThreadName("tessera_gloo");
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock,
                  [this] { return closed_ || (worker_wanted_ && !running_ && !queue_.empty()); });
    if (closed_) return;
    run_front(lock);
  }
}

void CallQueue::close() {
  Lock lock(mutex_);
  if (closed_) return;
  while (running_ || !queue_.empty()) running_ ? changed_.wait(lock) : run_front(lock);
  closed_ = true;
  changed_.notify_all();
  lock.unlock();
  if (worker_.joinable()) worker_.join();
  awaited_.reset();
  receives_.clear();
  sent_before_.clear();
  engine_.reset();
}

}  // namespace tessera::comm::gloo
