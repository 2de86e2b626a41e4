#include "replicate/roll_call.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::replication {
namespace {

constexpr int64_t kWords = 3;  // a turn

}  // namespace

RollCall::RollCall(Group group, JoinOptions options, std::vector<std::string> engine_names)
    : group_(std::move(group)),
      options_(options),
      engine_names_(std::move(engine_names)),
      last_to_finish_(group_->getSize() - 1) {}

std::vector<Turn> RollCall::exchange(const Turn& own) {
  auto words = at::tensor({static_cast<int64_t>(own.step), static_cast<int64_t>(own.engine),
                           static_cast<int64_t>(own.bucket)},
                          at::kLong);
  auto all = at::empty({kWords * group_->getSize()}, at::kLong);
  c10d::AllgatherOptions options;
  options.asyncOp = own.step == Step::Failed;  // it waits for nobody
  const auto work = group_->getBackend(c10::kCPU)->_allgather_base(all, words, options);
  if (own.step == Step::Failed) return {};
  if (work) work->wait();
  std::vector<Turn> turns;
  const auto* word = all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < group_->getSize(); ++rank, word += kWords) {
    turns.push_back({.step = static_cast<Step>(word[0]),
                     .engine = static_cast<size_t>(word[1]),
                     .bucket = static_cast<size_t>(word[2])});
  }
  return turns;
}

std::string RollCall::describe(const Turn& turn) const {
  const auto& name = engine_names_[turn.engine];
  switch (turn.step) {
    case Step::Forward:
      return "begins a forward of " + name;
    case Step::Bucket:
      return "sends bucket " + std::to_string(turn.bucket) + " of " + name;
    default:
      return "ends a backward of " + name;
  }
}

void RollCall::check(const std::vector<Turn>& turns) const {
  std::optional<size_t> active;
  std::optional<size_t> finished;
  for (size_t rank = 0; rank < turns.size(); ++rank) {
    TORCH_CHECK(turns[rank].step != Step::Failed, "Join: rank ", rank,
                " of the group has left it by an exception; its own output says which");
    auto& seen = turns[rank].step == Step::Finished ? finished : active;
    if (!seen) seen = rank;
  }
  if (!active) return;
  for (size_t rank = *active; rank < turns.size(); ++rank) {
    const auto& turn = turns[rank];
    TORCH_CHECK(turn.step == Step::Finished || turn == turns[*active],
                "Join: expected all ranks with batches left to do the same next, but rank ",
                *active, " ", describe(turns[*active]), " and rank ", rank, " ", describe(turn),
                "; ranks may differ in the number of iterations, not in what an iteration does");
  }
  TORCH_CHECK(!finished || !options_.throw_on_early_termination, "Join: rank ",
              finished.value_or(0), " has no batches left, rank ", *active,
              " has; throw_on_early_termination makes that an error on all ranks");
}

std::vector<Turn> RollCall::call(const Turn& own) {
  try {
    auto turns = exchange(own);
    check(turns);
    return turns;
  } catch (...) {
    is_over_ = true;  // on all ranks
    throw;
  }
}

Attendance RollCall::announce(const Turn& turn) {
  const auto turns = call(turn);
  int active = 0;
  for (size_t rank = turns.size(); rank-- > 0;) {
    if (turns[rank].step == Step::Finished) continue;
    if (active++ == 0) last_to_finish_ = static_cast<int>(rank);
    first_ = static_cast<int>(rank);
  }
  const double factor = options_.divide_by_initial_world_size
                            ? 1
                            : static_cast<double>(turns.size()) / static_cast<double>(active);
  return {.first = first_, .factor = factor};
}

std::optional<Turn> RollCall::listen() {
  const auto turns = call({.step = Step::Finished});
  std::optional<Turn> next;
  for (size_t rank = 0; rank < turns.size(); ++rank) {
    if (turns[rank].step == Step::Finished) continue;
    if (!next) first_ = static_cast<int>(rank);
    next = turns[rank];
    last_to_finish_ = static_cast<int>(rank);
  }
  is_over_ = !next;
  return next;
}

void RollCall::leave() noexcept {
  if (std::exchange(is_over_, true)) return;
  try {
    exchange({.step = Step::Failed});
  } catch (const std::exception& error) {
    TORCH_WARN("Join: could not tell the other ranks that this one has failed: ", error.what());
  }
}

}  // namespace tessera::replication
