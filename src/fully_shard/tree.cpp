#include "fully_shard/tree.h"

#include "fully_shard/state_impl.h"

namespace tessera::sharded {
namespace {

// With the unit in backward that makes two units' gradients in memory.
constexpr size_t kMostReducing = 1;

}  // namespace

void Tree::begin_forward() {
  open_backwards_.clear();  // one that threw has dropped its callback
  for (const auto& unit : std::exchange(reducing_, {})) unit->discard();
  for (const auto& member : members_) {
    if (const auto state = member.lock()) state->recover();
  }
  entered_.clear();
}

void Tree::end_forward() {
  order_ = std::exchange(entered_, {});
  for (const auto& member : members_) {
    if (const auto state = member.lock()) state->unit().drop_prefetch();
  }
}

void Tree::enter(State& state) { entered_.push_back(state.weak_from_this()); }

void Tree::prefetch_forward(State& state) {
  const size_t next = entered_.size();  // this one is the last of them
  if (next == 0 || next >= order_.size() || order_[next - 1].lock().get() != &state) return;
  if (const auto after = order_[next].lock()) after->unit().prefetch(Use::Forward);
}

void Tree::prefetch_backward(State& state) {
  for (size_t i = order_.size(); i-- > 1;) {
    if (order_[i].lock().get() != &state) continue;
    if (const auto before = order_[i - 1].lock()) before->unit().prefetch(Use::Backward);
    return;
  }
}

void Tree::expect_end_of_backward() {
  open_backwards_.expect(
      [self = shared_from_this()](int backward) { self->end_backward(backward); });
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
    if (const auto state = member.lock()) state->finish_backward();
  }
  deliver_until(0);
  for (const auto& member : members_) {
    if (const auto state = member.lock()) state->unit().drop_prefetch();
  }
}

}  // namespace tessera::sharded
