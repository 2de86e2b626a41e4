#include "fully_shard/tree.h"

#include "base/capture.h"
#include "comm/call_check.h"
#include "fully_shard/state_impl.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::detail::fully_shard {
namespace {

// Note [order of units]
// A gather is a collective, so a rank that calls units in another order than its peers waits for
// them forever, or gets another unit's bytes. In the first forward ranks therefore tell each other
// which unit comes, before they gather it; that costs a small message per unit, once. Later each
// compares with its own first forward alone: if ranks differ, one of them differs from that, and
// says so before it waits.

// With the unit in backward that makes two units' gradients in memory.
constexpr size_t kMostReducing = 1;

}  // namespace

void Tree::begin_forward() {
  open_backwards_.clear();  // one that threw has dropped its callback
  settle_failed();
  for (const auto& unit : std::exchange(reducing_, {})) unit->discard();
  for (const auto& member : members_) {
    const auto state = member.lock();
    if (!state) continue;
    state->recover();
    state->unit().drop_delivery();
    state->unit().drop_prefetch();  // begun before an exception, so with older values
  }
  entered_.clear();
}

void Tree::end_forward() {
  if (entered_.size() < first_.size()) compare_with_first(nullptr, "ended its forward");
  order_ = std::exchange(entered_, {});
  if (first_.empty()) first_ = order_;
  for (const auto& member : members_) {
    const auto state = member.lock();
    if (!state) continue;
    state->end_forward();
    state->unit().drop_prefetch();
  }
}

void Tree::enter(State& state) {
  if (first_.empty())
    compare_with_ranks(state);
  else
    compare_with_first(&state, "called " + state.describe());
  entered_.push_back(state.weak_from_this());
}

void Tree::compare_with_ranks(State& state) const {
  const auto& unit = state.unit();
  const bool gathers = !unit.is_empty() && unit.settings().is_split && !unit.is_unsharded();
  if (!gathers || unit.group()->getSize() == 1) return;
  // Ranks that were sharded in different orders know the unit by different numbers.
  const auto own = state.describe() + ", unit " + std::to_string(unit.settings().number);
  const capture::HiddenMessage no_part_of_recordings;
  const comm::Bookkeeping bookkeeping("a forward of fully_shard");
  const auto others = gather_bytes(own, unit.group());
  for (size_t rank = 0; rank < others.size(); ++rank) {
    TORCH_CHECK(others[rank] == own,
                "fully_shard: expected all ranks to call units in the same order, but in the first "
                "forward rank ",
                rank, " of the group calls ", others[rank], " where rank ", unit.group()->getRank(),
                " calls ", own,
                "; a unit is gathered by all ranks at a time: apply fully_shard, and call, in the "
                "same order on all of them");
  }
}

/// `state`: null at the end.
void Tree::compare_with_first(const State* state, const std::string& what) {
  const auto position = entered_.size();
  const auto expected = position < first_.size() ? first_[position].lock() : nullptr;
  if (has_warned_ || (state != nullptr && expected.get() == state)) return;
  has_warned_ = true;
  const auto root = members_.front().lock();
  TORCH_WARN("fully_shard: rank ", root ? root->unit().group()->getRank() : 0, " of the group ",
             what, " where its first forward ",
             expected ? "called " + expected->describe() : std::string("had ended"),
             "; units must be called in the same order by all ranks, or these wait for each other, "
             "and what is gathered ahead is what came next before. Said once.");
}

void Tree::prefetch_forward(State& state) {
  const size_t next = entered_.size();  // this one is the last of them
  if (next == 0 || next >= order_.size() || order_[next - 1].lock().get() != &state) return;
  if (const auto after = order_[next].lock()) after->gather_ahead(Use::Forward);
}

bool Tree::runs_last(const State& state) const {
  return !first_.empty() && first_.back().lock().get() == &state;
}

void Tree::prefetch_backward(State& state) {
  for (size_t i = order_.size(); i-- > 1;) {
    if (order_[i].lock().get() != &state) continue;
    if (const auto before = order_[i - 1].lock()) before->gather_ahead(Use::Backward);
    return;
  }
}

void Tree::expect_end_of_backward() {
  if (open_backwards_.is_expected()) return;
  settle_failed();
  open_backwards_.expect(
      [self = shared_from_this()](int backward) { self->end_backward(backward); },
      [self = shared_from_this()](int backward) { self->fail_backward(backward); });
}

void Tree::add_reducing(std::shared_ptr<Unit> unit) {
  reducing_.push_back(std::move(unit));
  deliver_until(kMostReducing);
}

void Tree::deliver_until(size_t most) {
  while (reducing_.size() > most) {
    reducing_.front()->deliver();
    reducing_.pop_front();
  }
}

void Tree::end_backward(int backward) {
  open_backwards_.close(backward);
  // One order on all ranks.
  for (const auto& member : members_) {
    const auto state = member.lock();
    if (!state) continue;
    state->finish_backward();
    state->reduce_earlier();
  }
  deliver_until(0);
  for (const auto& member : members_) {
    const auto state = member.lock();
    if (!state) continue;
    state->unit().end_delivery();
    state->unit().drop_prefetch();
  }
}

/// The caller sees the exception next: parameters and gradients are what they were, without waiting
/// for ranks that may not have come so far.
void Tree::fail_backward(int backward) {
  open_backwards_.close(backward);
  for (auto& unit : std::exchange(reducing_, {})) {
    unit->abandon_backward();
    failed_.push_back(std::move(unit));
  }
  bool drops = false;
  for (const auto& member : members_) {
    const auto state = member.lock();
    if (!state) continue;
    drops = state->recover_backward() || drops;
    state->unit().drop_delivery();
  }
  if (drops)
    TORCH_WARN(
        "fully_shard: a backward failed, and gradients that batches before it had added up "
        "without synchronisation are dropped; begin the step again with zero_grad()");
}

void Tree::settle_failed() {
  for (const auto& unit : std::exchange(failed_, {})) unit->discard();
}

}  // namespace tessera::detail::fully_shard
