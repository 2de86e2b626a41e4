#include "replicate/join.h"

#include <tessera/replicate/join.h>

#include "replicate/state_impl.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

namespace tessera::detail::replicate {
namespace {

constexpr int64_t kWords = 3;  // a turn

}  // namespace

JoinCoordinator::JoinCoordinator(Group group, JoinOptions options,
                                 std::vector<std::string> engine_names)
    : group_(std::move(group)),
      options_(options),
      engine_names_(std::move(engine_names)),
      last_to_finish_(group_->getSize() - 1) {}

std::vector<JoinStep> JoinCoordinator::exchange(const JoinStep& own) {
  auto words = at::tensor({static_cast<int64_t>(own.step), static_cast<int64_t>(own.engine),
                           static_cast<int64_t>(own.bucket)},
                          at::kLong);
  auto all = at::empty({kWords * group_->getSize()}, at::kLong);
  c10d::AllgatherOptions options;
  options.asyncOp = own.step == Step::Failed;  // it waits for nobody
  const auto work = group_->getBackend(c10::kCPU)->_allgather_base(all, words, options);
  if (own.step == Step::Failed) return {};
  if (work) work->wait();
  std::vector<JoinStep> turns;
  const auto* word = all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < group_->getSize(); ++rank, word += kWords) {
    turns.push_back({.step = static_cast<Step>(word[0]),
                     .engine = static_cast<size_t>(word[1]),
                     .bucket = static_cast<size_t>(word[2])});
  }
  return turns;
}

std::string JoinCoordinator::describe(const JoinStep& turn) const {
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

void JoinCoordinator::check(const std::vector<JoinStep>& turns) const {
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

std::vector<JoinStep> JoinCoordinator::call(const JoinStep& own) {
  try {
    auto turns = exchange(own);
    check(turns);
    return turns;
  } catch (...) {
    is_over_ = true;  // on all ranks
    throw;
  }
}

Participants JoinCoordinator::announce(const JoinStep& turn) {
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

std::optional<JoinStep> JoinCoordinator::listen() {
  const auto turns = call({.step = Step::Finished});
  std::optional<JoinStep> next;
  for (size_t rank = 0; rank < turns.size(); ++rank) {
    if (turns[rank].step == Step::Finished) continue;
    if (!next) first_ = static_cast<int>(rank);
    next = turns[rank];
    last_to_finish_ = static_cast<int>(rank);
  }
  is_over_ = !next;
  return next;
}

void JoinCoordinator::leave() noexcept {
  if (std::exchange(is_over_, true)) return;
  try {
    exchange({.step = Step::Failed});
  } catch (const std::exception& error) {
    TORCH_WARN("Join: could not tell the other ranks that this one has failed: ", error.what());
  }
}

}  // namespace tessera::detail::replicate

namespace tessera {
namespace detail::replicate {

namespace {

thread_local int open_joins = 0;

}  // namespace

bool is_joining() { return open_joins > 0; }

/// The engines inside a Join, and what they tell each other through.
class JoinedEngines {
 public:
  JoinedEngines(std::vector<std::shared_ptr<State>> states, JoinOptions options)
      : states_(std::move(states)) {
    std::vector<std::string> names;
    for (const auto& state : states_) {
      state->require_unjoined();
      names.push_back(state->module_name());
    }
    for (const auto& state : states_) {
      state->ensure_built();
      TORCH_CHECK_VALUE(ranks(state->group()) == ranks(states_[0]->group()),
                        "Join: expected modules over the same ranks, but ", state->module_name(),
                        " has another group than ", states_[0]->module_name(),
                        "; use one Join for each group");
    }
    coordinator_ =
        std::make_shared<JoinCoordinator>(states_[0]->join_group(), options, std::move(names));
    for (size_t i = 0; i < states_.size(); ++i) {
      states_[i]->join(
          [roll = coordinator_, i](Step step, size_t bucket) {
            return roll->announce({.step = step, .engine = i, .bucket = bucket});
          },
          /*announces_forward=*/options.throw_on_early_termination);
    }
    ++open_joins;
    is_open_ = true;
  }

  void finish() {
    if (std::exchange(is_finished_, true)) return;
    try {
      for (const auto& state : states_) state->check_finished();
      while (!coordinator_->is_over()) {
        if (const auto turn = coordinator_->listen())
          states_[turn->engine]->shadow(turn->step, turn->bucket, coordinator_->first());
        else
          take_model();
      }
    } catch (...) {
      leave();
      throw;
    }
    release();
  }

  void leave() noexcept {
    is_finished_ = true;
    coordinator_->leave();
    release();
  }

 private:
  void take_model() {
    for (const auto& state : states_) state->take_values_of(coordinator_->last_to_finish());
  }
  void release() noexcept {
    if (std::exchange(is_open_, false)) --open_joins;
    for (const auto& state : states_) state->end_join();
  }

  std::vector<std::shared_ptr<State>> states_;
  std::shared_ptr<JoinCoordinator> coordinator_;
  bool is_finished_ = false;
  bool is_open_ = false;  // among open_joins
};

}  // namespace detail::replicate

Join::Join(const std::vector<nn::ModuleRef>& modules, JoinOptions options)
    : exceptions_(std::uncaught_exceptions()) {
  TORCH_CHECK_VALUE(!modules.empty(), "Join: expected at least one module, got none");
  std::vector<std::shared_ptr<detail::replicate::State>> states;
  for (const auto& module : modules) {
    for (auto& state : detail::replicate::states_in(*module, "Join")) {
      if (std::find(states.begin(), states.end(), state) == states.end())
        states.push_back(std::move(state));
    }
  }
  engines_ = std::make_unique<detail::replicate::JoinedEngines>(std::move(states), options);
}

Join::~Join() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_)
    engines_->leave();
  else
    engines_->finish();
}

void Join::finish() { engines_->finish(); }

}  // namespace tessera
