#include <tessera/optim/lr_scheduler.h>

#include "optim/options.h"

#include <c10/util/Exception.h>
#include <c10/util/irange.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>

namespace tessera::optim {
namespace {

using std::numbers::pi;

double cosine_between(double start, double end, double share) {
  return end + (start - end) / 2.0 * (std::cos(pi * share) + 1);
}

double line_between(double start, double end, double share) {
  return (end - start) * share + start;
}

template <class Options>
Options* as(torch::optim::OptimizerOptions& options) {
  if (auto* group = dynamic_cast<GroupOptions<Options>*>(&options)) return &group->values;
  return nullptr;
}

/// Sets the momentum, or the first of betas; whether there is one.
bool set_momentum(torch::optim::OptimizerOptions& options, double momentum) {
  namespace stock = torch::optim;
  if (auto* sgd = as<SGDOptions>(options)) {
    sgd->momentum = momentum;
  } else if (auto* muon = as<MuonOptions>(options)) {
    muon->momentum = momentum;
  } else if (auto* adam = as<AdamOptions>(options)) {
    adam->betas.first = momentum;
  } else if (auto* adamw = as<AdamWOptions>(options)) {
    adamw->betas.first = momentum;
  } else if (auto* sgd = dynamic_cast<stock::SGDOptions*>(&options)) {
    sgd->momentum(momentum);
  } else if (auto* adam = dynamic_cast<stock::AdamOptions*>(&options)) {
    adam->betas({momentum, std::get<1>(adam->betas())});
  } else if (auto* adamw = dynamic_cast<stock::AdamWOptions*>(&options)) {
    adamw->betas({momentum, std::get<1>(adamw->betas())});
  } else {
    return false;
  }
  return true;
}

void check_groups(const std::string& name, size_t expected, size_t got) {
  TORCH_CHECK_VALUE(got == expected, name, ": expected ", expected,
                    " parameter groups, which the optimizer had when the scheduler was made, got ",
                    got, "; make the scheduler after add_param_group");
}

}  // namespace

LRScheduler::LRScheduler(const char* name, torch::optim::Optimizer& optimizer)
    : name_(name), optimizer_(optimizer) {
  for (auto& group : optimizer.param_groups()) base_lrs_.push_back(group.options().get_lr());
}

void LRScheduler::start() { update(); }

void LRScheduler::step() {
  ++last_epoch_;
  update();
}

void LRScheduler::update() {
  auto& groups = optimizer_.param_groups();
  check_groups(name_, base_lrs_.size(), groups.size());
  std::vector<double> rates;
  for (const auto g : c10::irange(groups.size()))
    rates.push_back(next_lr(g, groups[g].options().get_lr()));
  for (const auto g : c10::irange(groups.size())) groups[g].options().set_lr(rates[g]);
  last_lr_ = std::move(rates);
}

std::map<std::string, double> LRScheduler::state_dict() const {
  std::map<std::string, double> state{{"last_epoch", static_cast<double>(last_epoch_)}};
  for (const auto g : c10::irange(base_lrs_.size())) {
    state["base_lr." + std::to_string(g)] = base_lrs_[g];
    state["lr." + std::to_string(g)] = last_lr_[g];
  }
  return state;
}

void LRScheduler::load_state_dict(const std::map<std::string, double>& state) {
  const auto own = state_dict();
  const bool fits = std::ranges::equal(own, state, {}, &std::pair<const std::string, double>::first,
                                       &std::pair<const std::string, double>::first);
  TORCH_CHECK_VALUE(fits, name_, "::load_state_dict: expected last_epoch, and base_lr and lr of ",
                    base_lrs_.size(), " groups, got ", state.size(),
                    " numbers; load the state of a scheduler of an optimizer with as many groups");
  const double epoch = state.at("last_epoch");
  TORCH_CHECK_VALUE(epoch >= 0 && epoch == std::floor(epoch), name_,
                    "::load_state_dict: expected last_epoch to be a whole number from 0, got ",
                    epoch, "; load what state_dict() gave");
  auto& groups = optimizer_.param_groups();
  check_groups(name_, base_lrs_.size(), groups.size());
  const auto before = std::exchange(last_epoch_, static_cast<int64_t>(epoch));
  try {
    // Which sets a momentum that goes with the step, or refuses the step.
    for (const auto g : c10::irange(groups.size())) next_lr(g, groups[g].options().get_lr());
  } catch (...) {
    last_epoch_ = before;
    throw;
  }
  for (const auto g : c10::irange(base_lrs_.size())) {
    base_lrs_[g] = state.at("base_lr." + std::to_string(g));
    last_lr_[g] = state.at("lr." + std::to_string(g));
    groups[g].options().set_lr(last_lr_[g]);
  }
}

CosineAnnealingLR::CosineAnnealingLR(torch::optim::Optimizer& optimizer,
                                     CosineAnnealingLROptions options)
    : LRScheduler("CosineAnnealingLR", optimizer), options_(options) {
  TORCH_CHECK_VALUE(options.T_max > 0, name(), ": expected T_max of at least 1, got ",
                    options.T_max, "; set it to the number of steps");
  start();
}

// From the rate before, as Python does, so that other schedulers may change it too.
double CosineAnnealingLR::next_lr(size_t group, double lr) {
  const auto half = static_cast<double>(options_.T_max);
  const auto epoch = static_cast<double>(last_epoch());
  if (last_epoch() == 0) return lr;
  if ((last_epoch() - 1 - options_.T_max) % (2 * options_.T_max) == 0)
    return lr + (base_lr(group) - options_.eta_min) * (1 - std::cos(pi / half)) / 2;
  return (1 + std::cos(pi * epoch / half)) / (1 + std::cos(pi * (epoch - 1) / half)) *
             (lr - options_.eta_min) +
         options_.eta_min;
}

LinearLR::LinearLR(torch::optim::Optimizer& optimizer, LinearLROptions options)
    : LRScheduler("LinearLR", optimizer), options_(options) {
  TORCH_CHECK_VALUE(options.start_factor > 0 && options.start_factor <= 1, name(),
                    ": expected start_factor above 0 and up to 1, got ", options.start_factor,
                    "; correct the option");
  TORCH_CHECK_VALUE(options.end_factor >= 0 && options.end_factor <= 1, name(),
                    ": expected end_factor from 0 to 1, got ", options.end_factor,
                    "; correct the option");
  TORCH_CHECK_VALUE(options.total_iters > 0, name(), ": expected total_iters of at least 1, got ",
                    options.total_iters, "; set it to the number of steps");
  start();
}

double LinearLR::next_lr(size_t, double lr) {
  if (last_epoch() == 0) return lr * options_.start_factor;
  if (last_epoch() > options_.total_iters) return lr;
  const double rise = options_.end_factor - options_.start_factor;
  return lr * (1.0 + rise / (static_cast<double>(options_.total_iters) * options_.start_factor +
                             static_cast<double>(last_epoch() - 1) * rise));
}

namespace {

/// One for each group.
void expand(const char* name, const char* option, PerGroup& numbers, size_t groups) {
  if (numbers.values.size() == 1) numbers.values.resize(groups, numbers.values[0]);
  TORCH_CHECK_VALUE(numbers.values.size() == groups, name, ": expected one ", option, " or ",
                    groups, ", which is how many groups there are, got ", numbers.values.size(),
                    "; correct the option");
}

int64_t total_steps_of(const char* name, const OneCycleLROptions& options) {
  int64_t steps = options.total_steps.value_or(0);
  if (!options.total_steps)
    steps = options.epochs.value_or(0) * options.steps_per_epoch.value_or(0);
  TORCH_CHECK_VALUE(steps > 0, name,
                    ": expected total_steps, or epochs and steps_per_epoch, of at least 1, got ",
                    steps, " steps; set one or the other");
  return steps;
}

/// One stretch of a cycle: the last step of it, and between which values rates and momenta go.
enum class Level { Initial, Max, Min };
struct Phase {
  double end;
  Level from, to;
  bool lowers_momentum, raises_momentum;
};

std::vector<Phase> phases_of(const OneCycleLROptions& options, int64_t total) {
  const auto last = static_cast<double>(total - 1);
  const double up = options.pct_start * static_cast<double>(total);
  const Phase first{up - 1, Level::Initial, Level::Max, true, false};
  if (!options.three_phase) return {first, {last, Level::Max, Level::Min, false, true}};
  const double down = 2 * options.pct_start * static_cast<double>(total);
  return {first,
          {down - 2, Level::Max, Level::Initial, false, true},
          {last, Level::Initial, Level::Min, false, false}};
}

}  // namespace

OneCycleLR::OneCycleLR(torch::optim::Optimizer& optimizer, OneCycleLROptions options)
    : LRScheduler("OneCycleLR", optimizer),
      options_(std::move(options)),
      total_steps_(total_steps_of(name(), options_)) {
  const size_t groups = optimizer.param_groups().size();
  expand(name(), "max_lr", options_.max_lr, groups);
  expand(name(), "base_momentum", options_.base_momentum, groups);
  expand(name(), "max_momentum", options_.max_momentum, groups);
  TORCH_CHECK_VALUE(options_.pct_start >= 0 && options_.pct_start <= 1, name(),
                    ": expected pct_start from 0 to 1, got ", options_.pct_start,
                    "; correct the option");
  TORCH_CHECK_VALUE(options_.anneal_strategy == "cos" || options_.anneal_strategy == "linear",
                    name(), ": expected anneal_strategy \"cos\" or \"linear\", got \"",
                    options_.anneal_strategy, "\"; correct the option");
  start();
}

double OneCycleLR::next_lr(size_t group, double) {
  TORCH_CHECK_VALUE(last_epoch() <= total_steps_, name(), ": expected at most ", total_steps_,
                    " steps, got step ", last_epoch(), "; make it with more total_steps");
  const auto anneal = options_.anneal_strategy == "cos" ? cosine_between : line_between;
  const double max = options_.max_lr.values[group];
  const double initial = max / options_.div_factor;
  const auto level = [&](Level which) {
    if (which == Level::Initial) return initial;
    return which == Level::Max ? max : initial / options_.final_div_factor;
  };
  const auto phases = phases_of(options_, total_steps_);
  const auto now = static_cast<double>(last_epoch());
  size_t which = 0;
  while (which + 1 < phases.size() && now > phases[which].end) ++which;
  const Phase& phase = phases[which];
  const double begin = which == 0 ? 0 : phases[which - 1].end;
  const double share = phase.end == begin ? 1 : (now - begin) / (phase.end - begin);
  if (options_.cycle_momentum) {
    const double low = options_.base_momentum.values[group];
    const double high = options_.max_momentum.values[group];
    const double momentum =
        anneal(phase.raises_momentum ? low : high, phase.lowers_momentum ? low : high, share);
    TORCH_CHECK_VALUE(
        set_momentum(optimizer().param_groups()[group].options(), momentum), name(),
        ": expected an optimizer with momentum or betas, got another; set cycle_momentum = false");
  }
  return anneal(level(phase.from), level(phase.to), share);
}

WarmupStableDecayLR::WarmupStableDecayLR(torch::optim::Optimizer& optimizer,
                                         WarmupStableDecayLROptions options)
    : LRScheduler("WarmupStableDecayLR", optimizer), options_(std::move(options)) {
  const auto& o = options_;
  TORCH_CHECK_VALUE(o.num_warmup_steps >= 0 && o.num_decay_steps >= 0 &&
                        o.num_warmup_steps + o.num_decay_steps <= o.num_training_steps,
                    name(),
                    ": expected num_warmup_steps and num_decay_steps within "
                    "num_training_steps, got ",
                    o.num_warmup_steps, " + ", o.num_decay_steps, " of ", o.num_training_steps,
                    "; correct the options");
  TORCH_CHECK_VALUE(
      o.decay_type == "linear" || o.decay_type == "cosine" || o.decay_type == "1-sqrt", name(),
      ": expected decay_type \"linear\", \"cosine\" or \"1-sqrt\", got \"", o.decay_type,
      "\"; correct the option");
  TORCH_CHECK_VALUE(o.min_lr_ratio >= 0 && o.min_lr_ratio <= 1, name(),
                    ": expected min_lr_ratio from 0 to 1, got ", o.min_lr_ratio,
                    "; correct the option");
  start();
}

double WarmupStableDecayLR::next_lr(size_t group, double) {
  const auto now = static_cast<double>(last_epoch());
  const auto warmup = static_cast<double>(options_.num_warmup_steps);
  const auto decay = static_cast<double>(options_.num_decay_steps);
  const auto total = static_cast<double>(options_.num_training_steps);
  if (now < warmup) return base_lr(group) * now / warmup;
  if (now < total - decay) return base_lr(group);
  const double share = decay == 0 ? 1 : std::min(1.0, (now - (total - decay)) / decay);
  double left = 1 - share;
  if (options_.decay_type == "cosine") left = (1 + std::cos(pi * share)) / 2;
  if (options_.decay_type == "1-sqrt") left = 1 - std::sqrt(share);
  return base_lr(group) * (options_.min_lr_ratio + (1 - options_.min_lr_ratio) * left);
}

}  // namespace tessera::optim
