#include "comm/shm/channel.h"

#include <tessera/trace.h>

#include "base/text.h"
#include "comm/diagnostics.h"
#include "comm/shm/member.h"

#include <c10/util/Exception.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace tessera::comm::shm {
namespace {

// About 30 microseconds: longer than a peer needs for a small message, shorter than a time slice.
constexpr int kSpins = 1500;
constexpr int kSpinsOversubscribed = 20;
constexpr int kMostYields = 4;
constexpr std::chrono::milliseconds kStepAsideInterval{5};
// How long a process that has left its groups may take to end before its peers stop waiting for
// that.
constexpr std::chrono::milliseconds kLeavingGrace{1000};

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

std::atomic<void (*)(Phase, const Descriptor&)> phase_hook{nullptr};

Channel::Channel(const BackendRequest& request)
    : rank_(request.rank),
      size_(request.size),
      group_name_(request.group_name),
      world_ranks_(request.world_ranks),
      layout_(request.size),
      checks_calls_(request.check_calls),
      oversubscribed_(std::max(request.size, request.ranks_on_host) > usable_cores()),
      spin_limit_(oversubscribed_ ? kSpinsOversubscribed : kSpins),
      arena_(Arena::own()) {
  block_offset_ = arena_->allocate(layout_.total_bytes, "shm group '" + group_name_ + "'");
  auto* block = new (arena_->base() + block_offset_) RankBlock{};
  block->layout_version = kLayoutVersion;
  block->pid = getpid();
  for (int peer = 0; peer < size_; ++peer) {
    new (arena_->base() + block_offset_ + layout_.outboxes_at + peer * sizeof(Outbox)) Outbox{};
  }
  // If this throws the block stays: a peer that saw the address may still write to it.
  members_ = join(request, *arena_, block_offset_, layout_);
}

bool Channel::is_own_process() const { return members_[rank_].block->pid == getpid(); }

void Channel::leave() {
  auto alive = Health::Alive;
  self().block->health.compare_exchange_strong(alive, Health::Left);
  ring();
  for (const auto& member : members_) member.block->p2p_bell.ring();
}

Channel::~Channel() {
  if (!is_own_process()) return;
  leave();
  // Once its bit is set a peer may free its block: this rank never looks at it again.
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) members_[peer].block->departed.fetch_or(uint64_t{1} << rank_);
  }
  free_when_unused(arena_, block_offset_, rank_, std::move(members_), std::move(kept_));
}

void Channel::enter(const Descriptor& descriptor, std::chrono::milliseconds timeout) {
  const auto now = Clock::now();
  entered_ = {
      .descriptor = descriptor, .since = now, .deadline = now + std::min(timeout, kLongestTimeout)};
}

bool Channel::can_start_without_waiting() const {
  const uint64_t next = sequence_ + 1;
  for (int peer = 0; peer < size_; ++peer) {
    const auto& block = *members_[peer].block;
    if (peer == rank_) continue;
    if (block.finished.load(std::memory_order_acquire) + kDescriptors < next) return false;
    if (block.consumed.load(std::memory_order_acquire) + kSlots < round_ + 1) return false;
  }
  return true;
}

void Channel::announce(Descriptor& descriptor) {
  descriptor.sequence = ++sequence_;
  entered_.descriptor.sequence = sequence_;
  for (int peer = 0; peer < size_ && sequence_ > kDescriptors; ++peer) {
    if (peer == rank_) continue;
    await(peer, members_[peer].block->finished, sequence_ - kDescriptors);
    compare(peer, sequence_ - kDescriptors);  // while the ring still has it
  }
  auto& block = *self().block;
  block.descriptors[sequence_ % kDescriptorRing] = descriptor;
  tell_core();
  block.started.store(sequence_, std::memory_order_seq_cst);
  reach(Phase::Announced, descriptor);
  ring();
}

uint64_t Channel::take_rounds(uint64_t count) {
  const uint64_t first = round_;
  round_ += count;
  return first;
}

uint8_t* Channel::slot(uint64_t round) {
  for (int peer = 0; peer < size_ && round >= kSlots; ++peer) {
    if (peer != rank_) await(peer, members_[peer].block->consumed, round - kSlots + 1);
  }
  return self().slots + round % kSlots * layout_.slot_bytes;
}

void Channel::post_through(uint64_t end) {
  reach(Phase::Filled, entered_.descriptor);
  tell_core();
  self().block->posted.store(end, std::memory_order_seq_cst);
  ring();
  reach(Phase::Posted, entered_.descriptor);
}

const Descriptor& Channel::descriptor_of(int peer, uint64_t sequence) const {
  return members_[peer].block->descriptors[sequence % kDescriptorRing];
}

void Channel::meet(int peer) {
  await(peer, members_[peer].block->started, entered_.descriptor.sequence);
  compare(peer, entered_.descriptor.sequence);
}

void Channel::compare(int peer, uint64_t last) {
  for (auto& compared = members_[peer].compared; compared < last; ++compared) {
    const auto& ours = descriptor_of(rank_, compared + 1);
    const auto& theirs = descriptor_of(peer, compared + 1);
    if (!agree(ours, theirs)) fail_disagreement(compared + 1);
  }
}

void Channel::await_posted(int peer, uint64_t end) {
  await(peer, members_[peer].block->posted, end);
}

const uint8_t* Channel::peer_slot(int peer, uint64_t round) {
  await(peer, members_[peer].block->posted, round + 1);
  return members_[peer].slots + round % kSlots * layout_.slot_bytes;
}

void Channel::consume_through(uint64_t end) {
  tell_core();
  self().block->consumed.store(end, std::memory_order_seq_cst);
  ring();
}

void Channel::await_readers(uint64_t end) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) await(peer, members_[peer].block->consumed, end);
  }
}

void Channel::conclude() {
  reach(Phase::Drained, entered_.descriptor);
  self().block->finished.store(entered_.descriptor.sequence, std::memory_order_seq_cst);
  ring();
  reach(Phase::Concluded, entered_.descriptor);
}

int Channel::tell_core() {
  const int core = sched_getcpu();
  auto& told = self().block->core;
  // Peers read the line while they spin: leave it alone unless it changes.
  if (told.load(std::memory_order_relaxed) != core) told.store(core, std::memory_order_relaxed);
  return core;
}

// Two ranks that wake each other are kept on one core by the scheduler, even next to an idle one:
// each seems to need it only half of the time. So one of them moves, now and then, and leaves its
// affinity as it was.
void Channel::step_aside() {
  const auto now = Clock::now();
  if (now - last_step_aside_ < kStepAsideInterval) return;
  last_step_aside_ = now;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  cpu_set_t others = allowed;
  CPU_CLR(sched_getcpu(), &others);
  if (sched_setaffinity(0, sizeof(others), &others) == 0)
    sched_setaffinity(0, sizeof(allowed), &allowed);
}

bool Channel::spin(int peer, const std::atomic<uint64_t>& counter, uint64_t target) {
  int yields = 0;
  for (int i = 0; i < spin_limit_; ++i) {
    if (counter.load(std::memory_order_acquire) >= target) return true;
    relax();
    if (i % 64 != 8) continue;
    if (members_[peer].block->core.load(std::memory_order_relaxed) != tell_core()) continue;
    // Both share a core: the peer goes on only if this rank gives way.
    if (++yields > kMostYields) return false;
    if (!oversubscribed_ && rank_ > peer) step_aside();
    sched_yield();
    i = 0;
  }
  return false;
}

void Channel::await(int peer, const std::atomic<uint64_t>& counter, uint64_t target) {
  await(entered_, peer, counter, target, members_[peer].block->bell);
}

void Channel::await(const Pending& pending, int peer, const std::atomic<uint64_t>& counter,
                    uint64_t target, Bell& bell) {
  if (counter.load(std::memory_order_acquire) >= target) return;
  const Span span(SpanKind::Wait, "wait", world_rank(peer));
  if (spin(peer, counter, target)) return;
  wait(pending, bell, peer, [&] { return counter.load(std::memory_order_seq_cst) >= target; });
  tell_core();  // waking up often means waking elsewhere
}

void Channel::wait(const Pending& pending, Bell& bell, int watched,
                   c10::function_ref<bool()> ready) {
  // Peers ring often; asking the kernel about all of them each time would cost more than what is
  // waited for.
  auto next_check = Clock::now() + kHealthCheck;
  while (!ready()) {
    bell.sleep(ready, kHealthCheck);
    if (ready()) return;
    if (!has_failed() && Clock::now() < std::min(next_check, pending.deadline)) continue;
    next_check = Clock::now() + kHealthCheck;
    check(pending, watched, ready);
  }
}

void Channel::check(const Pending& pending, int watched, c10::function_ref<bool()> ready) {
  // Looked for before `ready`: a peer may have done its part and then left.
  const auto problem = find_problem(pending, watched);
  if (ready()) return;
  if (problem) fail(pending, problem->cause, problem->about);
  const auto deadline = std::min(pending.deadline, limit_.load(std::memory_order_relaxed));
  if (Clock::now() >= deadline) fail(pending, describe_timeout(pending, watched));
  if (is_late(pending.since) && !std::exchange(pending.is_late_told, true))
    tell_late(pending, watched, deadline);
}

void Channel::tell_late(const Pending& pending, int watched, Clock::time_point deadline) const {
  if (watched == kAnyPeer) return;
  const auto& call = pending.descriptor;
  const bool is_collective = !is_outside_sequence(call.kind) && call.kind != Kind::Gate;
  for (int peer = 0; is_collective && peer < rank_; ++peer) {
    const auto& block = *members_[peer].block;
    const bool waits_too = block.started.load(std::memory_order_acquire) >= call.sequence &&
                           block.finished.load(std::memory_order_acquire) < call.sequence;
    if (peer != watched && waits_too) return;  // one is enough
  }
  comm::tell_late(label(rank_), label(watched), pending.since,
                  describe(call) + " in group '" + group_name_ + "'", deadline);
}

std::optional<Problem> Channel::find_problem(const Pending& pending, int watched) const {
  if (has_failed()) return Problem{failure()};
  std::optional<Problem> found;
  int gone = 0;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    auto problem = problem_of(pending, peer, peer == watched || watched == kAnyPeer);
    if (!problem) continue;
    ++gone;
    // A peer that failed did so because of another one: better to hear of that one at first hand.
    const bool is_second_hand =
        members_[peer].block->health.load(std::memory_order_acquire) == Health::Failed;
    if (!found || !is_second_hand) found = std::move(problem);
    if (is_second_hand && watched == kAnyPeer) return found;  // the whole group has failed
  }
  return watched != kAnyPeer || gone == size_ - 1 ? found : std::nullopt;
}

bool Channel::is_gone(int peer) const {
  if (members_[peer].process->pid() == getpid() || members_[peer].process->has_exited())
    return true;
  auto& seen = left_seen_[peer];
  int64_t never = 0;
  const int64_t now = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  seen.compare_exchange_strong(never, now);
  return now - seen.load() > std::chrono::nanoseconds(kLeavingGrace).count();
}

std::optional<Problem> Channel::problem_of(const Pending& pending, int peer, bool owes) const {
  const auto& block = *members_[peer].block;
  const auto health = block.health.load(std::memory_order_acquire);
  // A peer that is through with this collective may leave; only the one waited for still owes
  // something.
  const bool is_through =
      is_outside_sequence(pending.descriptor.kind) ||
      block.finished.load(std::memory_order_acquire) >= pending.descriptor.sequence;
  if (!owes && is_through) return std::nullopt;
  if (health == Health::Failed) {
    const std::string cause = block.reason.data();
    if (block.about != About::Self) return Problem{cause, block.about};
    return Problem{label(peer) + " has failed: " + cause, About::Peer};
  }
  if (health == Health::Left) {
    // A process on its way out should be gone before its peers fail, so that whoever watches sees
    // the cause first.
    if (!owes || !is_gone(peer)) return std::nullopt;
    return Problem{label(peer) +
                   " has left the group without taking part; it shut down or ended early"};
  }
  if (!members_[peer].process->has_exited()) {
    const bool is_teller = rank_ == (peer == 0 ? 1 : 0);  // one is enough
    if (const auto stop =
            members_[peer].process->find_stop(label(peer), is_teller ? label(rank_) : ""))
      return Problem{*stop};
    return owes && pending.descriptor.kind == Kind::Gate ? contradiction(pending, peer)
                                                         : std::nullopt;
  }
  return Problem{label(peer) + " (process " + std::to_string(members_[peer].process->pid()) +
                 ") died; look at that rank's own output for the cause"};
}

std::vector<int> Channel::stragglers() const {
  std::vector<int> slowest;
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto& block = *members_[peer].block;
    const auto progress = block.posted.load() + block.consumed.load() + block.finished.load();
    if (progress < least) slowest.clear();
    if (progress <= least) slowest.push_back(peer);
    least = std::min(least, progress);
  }
  return slowest;
}

std::string Channel::describe_timeout(const Pending& pending, int watched) const {
  std::vector<int> arrived;
  std::vector<int> missing;
  std::string last;
  for (int peer = 0; peer < size_; ++peer) {
    const auto started = members_[peer].block->started.load(std::memory_order_acquire);
    const bool here = peer == rank_ || started >= pending.descriptor.sequence;
    (here ? arrived : missing).push_back(peer);
    if (here) continue;
    last += "; " + label(peer) + "'s last was " +
            (started == 0 ? std::string("none") : describe(descriptor_of(peer, started)));
  }
  const double waited = std::chrono::duration<double>(Clock::now() - pending.since).count();
  auto text = "timed out after " + format_seconds(waited) + " of waiting for " +
              (watched == kAnyPeer ? "any rank" : label(watched));
  if (!is_outside_sequence(pending.descriptor.kind)) {
    text += "; arrived: " + format_list(arrived) + "; missing: " + format_list(missing) + last;
    if (missing.empty()) text += "; furthest behind in it: " + format_list(stragglers());
  }
  if (pending.descriptor.kind == Kind::Gate && watched != kAnyPeer) {
    const auto started = members_[watched].block->started.load(std::memory_order_acquire);
    text += ", which has not come to it as often as this rank; its last collective in this group " +
            (started == 0 ? std::string("was none")
                          : "was " + describe(descriptor_of(watched, started)));
  }
  return text + "; raise the group's timeout if the ranks are only slow";
}

}  // namespace tessera::comm::shm
