// How a channel fails, what it says, and its record of recent collectives.
#include "base/text.h"
#include "comm/shm/channel.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <mutex>
#include <sstream>

namespace tessera::comm::shm {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

}  // namespace

int Channel::world_rank(int rank) const {
  return rank < static_cast<int>(world_ranks_.size()) ? world_ranks_[rank] : rank;
}

std::string Channel::label(int rank) const {
  const auto text = "rank " + std::to_string(rank);
  const int in_world = world_rank(rank);
  return in_world == rank ? text : text + " (world rank " + std::to_string(in_world) + ")";
}

// Note [same order]
// Ranks come to gates and collectives of a group in one order. So while this rank waits at a gate
// for a peer to come to it, that peer can't have begun a collective that this rank has not issued,
// nor have come to a gate that is beyond: one of the two has skipped something, and both would wait
// for each other until the time is up. A peer that is only behind has begun less.
std::optional<Problem> Channel::contradiction(const Pending& pending, int peer) const {
  const auto& block = *members_[peer].block;
  const auto started = block.started.load(std::memory_order_acquire);
  const auto gates = block.gates.load(std::memory_order_acquire);
  if (!checks_calls() || (started <= pending.issued && gates < pending.gates_beyond))
    return std::nullopt;
  const auto& theirs = started > pending.issued ? descriptor_of(peer, pending.issued + 1)
                                                : block.gate_calls[gates % kDescriptorRing];
  return Problem{describe_disagreement({{label(rank_), describe(pending.descriptor)},
                                        {label(peer), describe(theirs)}}) +
                     "; every rank must do the same: forwards, backwards, updates, state_dict and "
                     "full_tensor, also after an exception",
                 About::All};
}

void Channel::fail(const Pending& pending, const std::string& cause, About about) {
  auto& block = *self().block;
  auto alive = Health::Alive;
  static std::mutex mutex;  // the first error of a group wins; rare enough for one lock
  const std::lock_guard lock(mutex);
  if (!has_failed()) {
    failure_ = about == About::All ? "shm: in group '" + group_name_ + "' " + cause
                                   : "shm: " + describe(pending.descriptor) + " in group '" +
                                         group_name_ + "' on " + label(rank_) + ": " + cause;
    const auto length = std::min(cause.size(), kReasonBytes - 1);
    std::memcpy(block.reason.data(), cause.data(), length);
    block.reason[length] = '\0';
    block.about = about;
    block.health.compare_exchange_strong(alive, Health::Failed);
    failed_.store(true, std::memory_order_release);
    block.bell.ring();
    for (const auto& member : members_) member.block->p2p_bell.ring();
    std::cerr << recent() << std::flush;  // the cause comes with the exception
  }
  TORCH_CHECK_WITH(DistBackendError, false, failure_);
}

void Channel::fail_disagreement(uint64_t sequence) {
  std::vector<RankCall> calls;
  for (int peer = 0; peer < size_; ++peer) {
    const auto started = members_[peer].block->started.load(std::memory_order_acquire);
    const bool is_kept = started >= sequence && started < sequence + kDescriptorRing;
    if (is_kept) calls.push_back({label(peer), describe(descriptor_of(peer, sequence))});
  }
  fail(entered_, describe_disagreement(calls), About::All);
}

void Channel::check_kept(const Pending& pending, int peer) {
  if (is_alive(peer)) return;
  if (const auto problem = problem_of(pending, peer, /*owes=*/true))
    fail(pending, problem->cause, problem->about);
}

bool Channel::is_alive(int peer) const {
  std::atomic_thread_fence(
      std::memory_order_seq_cst);  // the reading comes before the look at its owner's health
  return members_[peer].block->health.load(std::memory_order_seq_cst) == Health::Alive;
}

void Channel::check_usable(const char* operation) const {
  TORCH_CHECK_WITH(DistBackendError, !has_failed(), "shm: ", operation, " in group '", group_name_,
                   "' on ", label(rank_), ": the group can't be used after an earlier error; ",
                   "end this rank, or shut down and init again. The error was: ", failure());
}

Channel::Record Channel::record(const Descriptor& descriptor, FlightEntry::State state) {
  auto& block = *self().block;
  const uint64_t count = block.flight_count.fetch_add(1);
  auto& entry = block.flight[count % kFlightEntries];
  entry.state.store(FlightEntry::Empty, std::memory_order_release);
  entry.kind = descriptor.kind;
  entry.dtype = descriptor.dtype;
  entry.reduce = descriptor.reduce;
  entry.peer = descriptor.root;
  entry.sequence = descriptor.sequence;
  entry.bytes = descriptor.bytes;
  entry.queued_ns = now_ns();
  entry.started_ns = 0;
  entry.ended_ns = 0;
  entry.state.store(state, std::memory_order_release);
  return {.entry = &entry, .count = count};
}

void Channel::update(const Record& record, uint64_t sequence, FlightEntry::State state) {
  if (self().block->flight_count.load() > record.count + kFlightEntries) return;
  auto& entry = *record.entry;
  entry.sequence = sequence;
  if (entry.started_ns == 0)
    entry.started_ns = state == FlightEntry::Running ? now_ns() : entry.queued_ns;
  if (state != FlightEntry::Running) entry.ended_ns = now_ns();
  entry.state.store(state, std::memory_order_release);
}

std::string Channel::recent() const {
  constexpr const char* kStates[] = {"", "queued", "running", "done", "failed"};
  std::ostringstream out;
  out << "tessera: recent collectives of " << label(rank_) << " in group '" << group_name_
      << "':\n";
  const auto& block = *members_[rank_].block;
  const uint64_t count = block.flight_count.load();
  const int64_t now = now_ns();
  for (uint64_t i = count > kFlightEntries ? count - kFlightEntries : 0; i < count; ++i) {
    const auto& entry = block.flight[i % kFlightEntries];
    const auto state = entry.state.load(std::memory_order_acquire);
    if (state == FlightEntry::Empty) continue;
    out << "  "
        << describe({.sequence = entry.sequence,
                     .kind = entry.kind,
                     .dtype = entry.dtype,
                     .reduce = entry.reduce,
                     .root = entry.peer,
                     .bytes = entry.bytes})
        << ": " << kStates[state] << ", issued "
        << format_seconds(static_cast<double>(now - entry.queued_ns) * 1e-9) << " ago";
    if (state == FlightEntry::Done) {
      out << ", took " << static_cast<double>(entry.ended_ns - entry.started_ns) * 1e-3 << " us";
    }
    out << "\n";
  }
  return out.str();
}

}  // namespace tessera::comm::shm
