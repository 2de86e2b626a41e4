#include <tessera/replicate/join.h>

#include "replicate/state_impl.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

namespace tessera {
namespace replication {

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
    roll_ = std::make_shared<RollCall>(states_[0]->roll_call_group(), options, std::move(names));
    for (size_t i = 0; i < states_.size(); ++i) {
      states_[i]->join(
          [roll = roll_, i](Step step, size_t bucket) {
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
      while (!roll_->is_over()) {
        if (const auto turn = roll_->listen())
          states_[turn->engine]->shadow(turn->step, turn->bucket, roll_->first());
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
    roll_->leave();
    release();
  }

 private:
  void take_model() {
    for (const auto& state : states_) state->take_values_of(roll_->last_to_finish());
  }
  void release() noexcept {
    if (std::exchange(is_open_, false)) --open_joins;
    for (const auto& state : states_) state->end_join();
  }

  std::vector<std::shared_ptr<State>> states_;
  std::shared_ptr<RollCall> roll_;
  bool is_finished_ = false;
  bool is_open_ = false;  // among open_joins
};

}  // namespace replication

Join::Join(const std::vector<nn::ModuleRef>& modules, JoinOptions options)
    : exceptions_(std::uncaught_exceptions()) {
  TORCH_CHECK_VALUE(!modules.empty(), "Join: expected at least one module, got none");
  std::vector<std::shared_ptr<replication::State>> states;
  for (const auto& module : modules) {
    for (auto& state : replication::states_in(*module, "Join")) {
      if (std::find(states.begin(), states.end(), state) == states.end())
        states.push_back(std::move(state));
    }
  }
  engines_ = std::make_unique<replication::JoinedEngines>(std::move(states), options);
}

Join::~Join() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_)
    engines_->leave();
  else
    engines_->finish();
}

void Join::finish() { engines_->finish(); }

}  // namespace tessera
