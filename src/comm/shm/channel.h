#pragma once

#include "comm/backends.h"
#include "comm/shm/member.h"

#include <c10/util/FunctionRef.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::comm::shm {

/// Note [rounds]. Collectives of a group are cut into rounds, numbered through all collectives
/// alike on every rank. In round r a rank may put bytes into its slot r % kSlots and say so
/// (`posted`); peers read it there and say when they are done (`consumed`); the slot is written
/// again only when all are. Collectives start in one order on every rank, so the counters alone
/// keep neighbouring ones apart. Before a rank reads data it compares descriptors: ranks that
/// disagree get an error, never each other's bytes.
///
/// Memory, counters and waiting. One thread at a time may call the functions for collectives.
class Channel {
 public:
  /// Joins; blocks until every rank of the group has, at most request.timeout.
  explicit Channel(const BackendRequest& request);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t slot_bytes() const { return layout_.slot_bytes; }
  /// More ranks than cores: spinning takes time from the rank waited for.
  bool is_oversubscribed() const { return oversubscribed_; }
  const Member& member(int rank) const { return members_[rank]; }
  Member& self() { return members_[rank_]; }

  // --- the life of a collective
  /// The functions below are about this collective until the next call.
  void enter(const Descriptor& descriptor, std::chrono::milliseconds timeout);
  /// True if announce() and one slot() would not wait.
  bool can_start_without_waiting() const;
  /// Publishes the descriptor under the next sequence number, which it stores in it.
  void announce(Descriptor& descriptor);
  /// First of `count` consecutive rounds.
  uint64_t take_rounds(uint64_t count);
  /// This rank's slot for `round`, once no peer reads it any more.
  uint8_t* slot(uint64_t round);
  /// All rounds before `end` may be read.
  void post_through(uint64_t end);
  /// Waits until `peer` has announced the same collective; throws if it announced another one.
  void meet(int peer);
  /// Whether a rank meets all peers in every collective, and not only those whose data it reads.
  bool checks_calls() const { return checks_calls_; }
  uint64_t next_sequence() const { return sequence_ + 1; }
  const Descriptor& descriptor_of(int peer, uint64_t sequence) const;
  const uint8_t* peer_slot(int peer, uint64_t round);  // once posted
  void await_posted(int peer, uint64_t end);
  /// This rank reads no slot of rounds before `end` any more.
  void consume_through(uint64_t end);
  /// Until no peer reads rounds before `end`: memory handed out by address may be written again.
  void await_readers(uint64_t end);
  /// The collective entered is complete on this rank.
  void conclude();

  // --- waiting and failing
  /// No wait lasts beyond this point in time, whatever its own deadline; from any thread.
  bool has_limit() const { return limit_.load() != Clock::time_point::max(); }
  void set_limit(Clock::time_point limit) { limit_.store(limit, std::memory_order_relaxed); }
  /// Sleeps on `bell` until `ready`; throws when `watched` (kAnyPeer: every peer) can no longer
  /// make it so because it failed, left or died, or when the time is up.
  void wait(const Pending& pending, Bell& bell, int watched, c10::function_ref<bool()> ready);
  /// Until `counter` is `target`; `peer` raises it and rings `bell`. Spins first.
  void await(const Pending& pending, int peer, const std::atomic<uint64_t>& count, uint64_t target,
             Bell& bell);
  /// One look: throws as wait() does unless `ready`.
  void check(const Pending& pending, int watched, c10::function_ref<bool()> ready);
  /// Marks the group as failed for everybody and throws DistBackendError.
  [[noreturn]] void fail(const Pending& pending, const std::string& cause,
                         About about = About::Self);
  /// Because the calls of this number, as far as announced, do not go together.
  [[noreturn]] void fail_disagreement(uint64_t sequence);
  /// Tells the peers that this rank takes part in nothing any more.
  void leave();
  /// Until no peer can look at this rank's block any more.
  void keep_until_unused(std::shared_ptr<void> shared) { kept_.push_back(std::move(shared)); }
  /// False in a process forked from the rank: it must not act in the rank's name.
  bool is_own_process() const;
  /// Throws if `peer`, whose memory was just read by address, has failed: it may have changed that
  /// memory since.
  void check_kept(const Pending& pending, int peer);
  void check_kept(int peer) { check_kept(entered_, peer); }
  /// Neither failed nor left, as of everything read from its memory before the call.
  bool is_alive(int peer) const;
  void check_usable(const char* operation) const;
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  const std::string& failure() const { return failure_; }
  int world_rank(int rank) const;
  /// "rank 2", with the world's number where it differs.
  std::string label(int rank) const;

  struct Record {
    FlightEntry* entry = nullptr;
    uint64_t count = 0;  // the entry is this one's until a later one takes it over
  };
  Record record(const Descriptor& descriptor, FlightEntry::State state);
  void update(const Record& record, uint64_t sequence, FlightEntry::State state);
  std::string recent() const;
  const std::string& group_name() const { return group_name_; }

 private:
  void await(int peer, const std::atomic<uint64_t>& counter, uint64_t target);
  void compare(int peer, uint64_t last);
  bool spin(int peer, const std::atomic<uint64_t>& counter, uint64_t target);
  int tell_core();
  void step_aside();
  bool is_gone(int peer) const;
  std::optional<Problem> find_problem(const Pending& pending, int watched) const;
  std::optional<Problem> problem_of(const Pending& pending, int peer, bool owes) const;
  std::optional<Problem> contradiction(const Pending& pending, int peer) const;
  std::string describe_timeout(const Pending& pending, int watched) const;
  void tell_late(const Pending& pending, int watched, Clock::time_point deadline) const;
  std::vector<int> stragglers() const;  // the peers that have done the least
  void ring() { self().block->bell.ring(); }

  const int rank_, size_;
  const std::string group_name_;
  const std::vector<int> world_ranks_;
  const Layout layout_;
  const bool checks_calls_;
  bool oversubscribed_;
  int spin_limit_;
  std::shared_ptr<Arena> arena_;
  size_t block_offset_ = 0;
  std::vector<Member> members_;
  std::vector<std::shared_ptr<void>> kept_;
  uint64_t sequence_ = 0, round_ = 0;  // of the newest announced collective; the next free one
  Pending entered_;
  std::atomic<bool> failed_{false};
  std::string failure_;  // what was thrown first; not changed once `failed_` is set
  Clock::time_point last_step_aside_{};
  mutable std::array<std::atomic<int64_t>, kMaxRanks> left_seen_{};  // when first, by peer
  std::atomic<Clock::time_point> limit_{Clock::time_point::max()};
};

}  // namespace tessera::comm::shm
