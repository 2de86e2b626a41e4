#pragma once

#include "base/autograd.h"
#include "fully_shard/unit.h"

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace tessera::detail::fully_shard {

class State;

/// The units under one outermost module: the order in which they run, and the end of backward.
class Tree : public std::enable_shared_from_this<Tree> {
 public:
  explicit Tree(std::vector<std::weak_ptr<State>> members) : members_(std::move(members)) {}

  /// The outermost module's forward begins: what an earlier one that failed left is put in order.
  void begin_forward();
  void end_forward();
  /// A unit's forward begins, and its gather. See Note [order of units].
  void enter(State& state);
  /// Starts to gather what came after this one last time.
  void prefetch_forward(State& state);
  /// Whether it was the last to run in the first forward: its backward comes first. Ranks agree on
  /// that one, whatever failed since on one of them.
  bool runs_last(const State& state) const;
  void prefetch_backward(State& state);

  /// Inside a backward: finish() what is left when it ends.
  void expect_end_of_backward();
  /// A unit's gradients are on their way. The one before it is waited for.
  void add_reducing(std::shared_ptr<Unit> unit);
  /// Waits for all of them.
  void deliver() { deliver_until(0); }

 private:
  void end_backward(int backward);
  void fail_backward(int backward);
  void settle_failed();
  void compare_with_ranks(State& state) const;
  void compare_with_first(const State* state, const std::string& what);
  /// Waits for the oldest until at most so many units' gradients are on their way.
  void deliver_until(size_t most);

  std::vector<std::weak_ptr<State>> members_;  // in the order of the modules
  std::vector<std::weak_ptr<State>> order_;    // of the last forward
  std::vector<std::weak_ptr<State>> entered_;  // of this one
  std::vector<std::weak_ptr<State>> first_;    // of the first that ended
  bool has_warned_ = false;
  BackwardCallbacks open_backwards_;
  std::deque<std::shared_ptr<Unit>> reducing_;
  std::vector<std::shared_ptr<Unit>> failed_;  // whose gradients were, when a backward failed
};

}  // namespace tessera::detail::fully_shard
