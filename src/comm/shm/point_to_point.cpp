#include "comm/shm/point_to_point.h"

#include "base/text.h"
#include "comm/shm/medium.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <cstring>

namespace tessera::comm::shm {

/// One send or receive under way.
class P2PWork final : public c10d::Work {
 public:
  P2PWork(int rank, P2PQueue::Message message, std::shared_ptr<P2PQueue> queue);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  std::vector<at::Tensor> result() override { return {message_.original}; }
  int sourceRank() const override { return source; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // --- for the queue
  const P2PQueue::Message& message() const { return message_; }
  const Pending& pending() const { return pending_; }
  bool is_done() const { return done_.load(std::memory_order_acquire); }
  void end(const std::exception_ptr& exception);
  void tell_future();

  int source = -1;            // who sent it
  P2PEntry* entry = nullptr;  // of a send that is read in place

 private:
  P2PQueue::Message message_;
  Pending pending_;
  std::shared_ptr<P2PQueue> queue_;
  Channel::Record record_;
  std::atomic<bool> done_{false};
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_told_ = false;
};

P2PWork::P2PWork(int rank, P2PQueue::Message message, std::shared_ptr<P2PQueue> queue)
    : Work(rank, message.is_send ? c10d::OpType::SEND : c10d::OpType::RECV,
           message.is_send ? "tessera:send" : "tessera:recv",
           std::vector<at::Tensor>{message.original}),
      message_(std::move(message)),
      queue_(std::move(queue)) {
  const auto now = Clock::now();
  pending_.descriptor = {.sequence = ++queue_->issued_,
                         .kind = message_.is_send ? Kind::Send : Kind::Receive,
                         .dtype = message_.dtype,
                         .root = message_.peer,
                         .bytes = message_.data.size};
  pending_.since = now;
  pending_.deadline = now + std::min(message_.timeout, kLongestTimeout);
  record_ = queue_->channel_.record(pending_.descriptor, FlightEntry::Running);
}

bool P2PWork::wait(std::chrono::milliseconds timeout) {
  if (!is_done()) queue_->wait_for(*this, timeout);
  const std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  if (message_.device) message_.device->join();
  return true;
}

bool P2PWork::isCompleted() {
  if (!is_done() && !queue_->poll(*this)) return false;
  return !message_.device || exception() || message_.device->has_ended();
}

void P2PWork::abort() {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "shm: a message can't be aborted alone; shut the group down");
}

void P2PWork::tell_future() {
  {
    const std::lock_guard lock(future_mutex_);
    if (!future_ || std::exchange(future_told_, true)) return;
  }
  const c10::OptionalStreamGuard guard(message_.device ? std::optional(message_.device->stream())
                                                       : std::nullopt);
  exception_ ? future_->setError(exception_) : future_->markCompleted(c10::IValue(result()));
}

c10::intrusive_ptr<c10::ivalue::Future> P2PWork::getFuture() {
  {
    const std::lock_guard lock(future_mutex_);
    if (!future_)
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), devices_of(message_.device));
  }
  is_done() ? tell_future() : queue_->start_worker();
  return future_;
}

void P2PWork::end(const std::exception_ptr& exception) {
  if (!exception && !message_.is_send && !message_.contiguous.is_same(message_.original)) {
    const at::NoGradGuard no_grad;
    if (message_.device) {
      message_.device->copy_back(message_.original, message_.contiguous);
      message_.device->end();
    } else {
      message_.original.detach().copy_(message_.contiguous);
    }
  }
  queue_->channel_.update(record_, pending_.descriptor.sequence,
                          exception ? FlightEntry::Failed : FlightEntry::Done);
  const std::lock_guard lock(future_mutex_);
  finish(exception);
  done_.store(true, std::memory_order_release);
}

P2PQueue::P2PQueue(std::shared_ptr<Channel> channel)
    : owned_(std::move(channel)), channel_(*owned_) {}

P2PQueue::~P2PQueue() { close(); }

c10::intrusive_ptr<c10d::Work> P2PQueue::submit(Message message) {
  auto work = c10::make_intrusive<P2PWork>(channel_.rank(), std::move(message), shared_from_this());
  bool needs_worker = false;
  Works ended;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, !closed_, "shm: group '", channel_.group_name(),
                     "' has been shut down");
    pending_.push_back(work);
    ended = progress();
    // It must go on without anybody waiting for it: its peer may wait for it before it comes to
    // what we wait for.
    needs_worker = !work->is_done();
  }
  tell(ended);
  if (needs_worker) start_worker();
  return work;
}

void P2PQueue::tell(const Works& ended) {
  for (const auto& work : ended) work->tell_future();
  if (!ended.empty())
    channel_.self().block->p2p_bell.ring();  // others of this rank may wait for them
}

P2PQueue::Works P2PQueue::progress() {
  Works ended;
  std::vector<const P2PWork*> blocked;
  for (auto it = pending_.begin(); it != pending_.end();) {
    const auto work = *it;
    std::exception_ptr exception;
    bool is_finished = false;
    try {
      // What an earlier one did not find may be there a moment later: it is still the earlier
      // one's.
      const bool is_next = std::none_of(blocked.begin(), blocked.end(),
                                        [&](auto* one) { return precedes(*one, *work); });
      is_finished = is_next && try_finish(*work);
    } catch (...) {
      exception = std::current_exception();
    }
    if (!is_finished && !exception) {
      blocked.push_back(work.get());
      ++it;
      continue;
    }
    it = pending_.erase(it);
    work->end(exception);
    ended.push_back(work);
  }
  for (const auto* work : blocked) {
    if (!work->message().is_send) make_room(work->message().peer);
  }
  return ended;
}

bool P2PQueue::precedes(const P2PWork& earlier, const P2PWork& later) {
  const auto& one = earlier.message();
  const auto& other = later.message();
  if (one.is_send != other.is_send) return false;
  if (one.is_send)
    return one.peer == other.peer && earlier.entry == nullptr && later.entry == nullptr;
  return one.tag == other.tag &&
         (one.peer == other.peer || one.peer == kAnyPeer || other.peer == kAnyPeer);
}

bool P2PQueue::try_finish(P2PWork& work) {
  return work.message().is_send ? try_send(work) : try_receive(work);
}

void P2PQueue::reclaim(Outbox& outbox) {
  for (auto& entry : outbox) {
    // What was read in place is freed by the work that waits for it.
    if (entry.state.load(std::memory_order_acquire) != P2PEntry::Taken || entry.is_buffered == 0)
      continue;
    Arena::own()->release(entry.offset);
    entry.state.store(P2PEntry::Free, std::memory_order_relaxed);
  }
}

bool P2PQueue::try_send(P2PWork& work) {
  if (work.entry != nullptr) {
    if (work.entry->state.load(std::memory_order_acquire) != P2PEntry::Taken) return false;
    work.entry->state.store(P2PEntry::Free, std::memory_order_relaxed);
    return true;
  }
  const auto& message = work.message();
  auto& outbox = channel_.self().outboxes[message.peer];
  reclaim(outbox);
  P2PEntry* entry = nullptr;
  for (auto& candidate : outbox) {
    if (candidate.state.load(std::memory_order_relaxed) == P2PEntry::Free) entry = &candidate;
  }
  if (entry == nullptr) return false;
  const auto in_place = Arena::own()->offset_of(message.data.data, message.data.size);
  const auto offset = in_place ? *in_place : Arena::own()->allocate(message.data.size, "send");
  if (!in_place && message.data.size > 0) {
    copy_to_cache(Arena::own()->base() + offset, message.data.data, message.data.size);
  }
  entry->tag = message.tag;
  entry->dtype = message.dtype;
  entry->number = ++sent_;
  entry->bytes = message.data.size;
  entry->offset = offset;
  entry->is_buffered = in_place ? 0 : 1;
  entry->state.store(P2PEntry::Full, std::memory_order_seq_cst);
  channel_.member(message.peer).block->p2p_bell.ring();
  if (in_place) work.entry = entry;
  return !in_place;
}

P2PEntry* P2PQueue::find_sent(int source, int tag) {
  P2PEntry* oldest = nullptr;
  for (auto& entry : channel_.member(source).outboxes[channel_.rank()]) {
    if (entry.state.load(std::memory_order_seq_cst) != P2PEntry::Full || entry.tag != tag) continue;
    if (oldest == nullptr || entry.number < oldest->number) oldest = &entry;
  }
  return oldest;
}

void P2PQueue::make_room(int source) {
  for (int peer = 0; peer < channel_.size(); ++peer) {
    if (source != kAnyPeer && source != peer) continue;
    auto& outbox = channel_.member(peer).outboxes[channel_.rank()];
    const auto is_full = [](const P2PEntry& entry) { return entry.state.load() == P2PEntry::Full; };
    if (!std::all_of(outbox.begin(), outbox.end(), is_full)) continue;
    std::vector<P2PEntry*> entries;
    for (auto& entry : outbox) entries.push_back(&entry);
    std::sort(entries.begin(), entries.end(),
              [](auto* one, auto* other) { return one->number < other->number; });
    for (auto* entry : entries) {
      const auto* memory = channel_.member(peer).arena_base + entry->offset;
      std::vector<uint8_t> content(memory, memory + entry->bytes);
      // A sender that gave up may have changed a tensor that is read in place; the receive will say
      // so.
      if (entry->is_buffered == 0 && !channel_.is_alive(peer)) continue;
      early_.push_back({.source = peer,
                        .tag = entry->tag,
                        .dtype = entry->dtype,
                        .number = entry->number,
                        .content = std::move(content)});
      entry->state.store(P2PEntry::Taken, std::memory_order_seq_cst);
    }
    channel_.member(peer).block->p2p_bell.ring();
  }
}

bool P2PQueue::try_receive_early(P2PWork& work) {
  const auto& message = work.message();
  const auto found = std::find_if(early_.begin(), early_.end(), [&](const EarlySend& send) {
    return send.tag == message.tag && (message.peer == kAnyPeer || message.peer == send.source);
  });
  if (found == early_.end()) return false;
  work.source = found->source;
  check_fits(work, found->number, found->content.size(), found->dtype);
  if (!found->content.empty())
    std::memcpy(message.data.data, found->content.data(), found->content.size());
  early_.erase(found);
  return true;
}

void P2PQueue::check_fits(const P2PWork& work, uint64_t number, size_t bytes, int dtype) {
  const auto& ours = work.pending().descriptor;
  if (bytes == ours.bytes && dtype == ours.dtype) return;
  auto theirs = ours;
  theirs.kind = Kind::Send;
  theirs.sequence = number;
  theirs.root = channel_.rank();
  theirs.bytes = bytes;
  theirs.dtype = dtype;
  channel_.fail(work.pending(),
                describe_disagreement({{channel_.label(work.source), describe(theirs)},
                                       {channel_.label(channel_.rank()), describe(ours)}}),
                About::All);
}

bool P2PQueue::try_receive(P2PWork& work) {
  if (try_receive_early(work)) return true;
  const auto& message = work.message();
  P2PEntry* entry = nullptr;
  for (int source = 0; source < channel_.size() && entry == nullptr; ++source) {
    if (message.peer != kAnyPeer && message.peer != source) continue;
    entry = find_sent(source, message.tag);
    work.source = source;
  }
  if (entry == nullptr) return false;
  check_fits(work, entry->number, entry->bytes, entry->dtype);
  take(work, *entry);
  return true;
}

void P2PQueue::take(P2PWork& work, P2PEntry& entry) {
  const auto& source = channel_.member(work.source);
  if (entry.bytes > 0)
    copy_to_cache(work.message().data.data, source.arena_base + entry.offset, entry.bytes);
  // A sender that gave up waiting may have changed a tensor that is read in place.
  if (entry.is_buffered == 0) channel_.check_kept(work.pending(), work.source);
  entry.state.store(P2PEntry::Taken, std::memory_order_seq_cst);
  source.block->p2p_bell.ring();
}

bool P2PQueue::poll(P2PWork& work) {
  Works ended;
  {
    const std::lock_guard lock(mutex_);
    ended = progress();
  }
  tell(ended);
  return work.is_done();
}

void P2PQueue::wait_for(P2PWork& work, std::chrono::milliseconds timeout) {
  const auto& pending = work.pending();
  const bool limited = timeout > kNoTimeout;
  const auto deadline = Clock::now() + std::min(timeout, kLongestTimeout);
  const auto is_over = [&] { return closed_.load() || (limited && Clock::now() >= deadline); };
  try {
    channel_.wait(pending, channel_.self().block->p2p_bell, work.message().peer,
                  [&] { return poll(work) || is_over(); });
    TORCH_CHECK_WITH(DistBackendError, work.is_done() || !closed_,
                     "shm: ", describe(pending.descriptor), ": group '", channel_.group_name(),
                     "' was shut down before the message came");
  } catch (...) {
    end_all(std::current_exception());
  }
  TORCH_CHECK_WITH(DistBackendError, work.is_done(), "shm: wait: ", describe(pending.descriptor),
                   " in group '", channel_.group_name(), "' is not complete after ",
                   format_seconds(static_cast<double>(timeout.count()) / 1e3),
                   "; it is still under way");
}

void P2PQueue::check_all() {
  Works works;
  {
    const std::lock_guard lock(mutex_);
    works = pending_;
  }
  try {
    for (const auto& work : works) {
      channel_.check(work->pending(), work->message().peer, [&] { return poll(*work); });
    }
  } catch (...) {
    end_all(std::current_exception());
  }
}

c10::intrusive_ptr<P2PWork> P2PQueue::oldest_send() {
  const std::lock_guard lock(mutex_);
  for (const auto& work : pending_) {
    if (work->message().is_send) return work;
  }
  return {};
}

void P2PQueue::end_all(const std::exception_ptr& exception) {
  Works ended;
  {
    const std::lock_guard lock(mutex_);
    ended = std::exchange(pending_, {});
    for (const auto& work : ended) work->end(exception);
  }
  tell(ended);
}

void P2PQueue::start_worker() {
  const std::lock_guard lock(mutex_);
  if (closed_ || worker_.joinable()) return;
  worker_ = std::thread([this] { work_loop(); });
}

void P2PQueue::work_loop() {
  c10::setThreadName("tessera_mail");
  auto& bell = channel_.self().block->p2p_bell;
  auto next_check = Clock::now() + kHealthCheck;
  while (!closed_) {
    // Progress and the look at the bell in one: what comes after it rings.
    bell.sleep(
        [&] {
          Works ended;
          {
            const std::lock_guard lock(mutex_);
            ended = progress();
          }
          tell(ended);
          return closed_.load();
        },
        kHealthCheck);
    if (Clock::now() < next_check) continue;
    next_check = Clock::now() + kHealthCheck;
    check_all();
  }
}

void P2PQueue::close() {
  if (!channel_.is_own_process()) return;
  if (closed_) return;
  while (const auto send = oldest_send()) wait_for(*send, kNoTimeout);
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  channel_.self().block->p2p_bell.ring();
  if (worker_.joinable()) worker_.join();
  end_all(std::make_exception_ptr(C10_BUILD_ERROR(
      DistBackendError,
      c10::str("shm: group '", channel_.group_name(), "' was shut down before the message came"))));
  const std::lock_guard lock(mutex_);
  for (int peer = 0; peer < channel_.size(); ++peer) reclaim(channel_.self().outboxes[peer]);
}

}  // namespace tessera::comm::shm
