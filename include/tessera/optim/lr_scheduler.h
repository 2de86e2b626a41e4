#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

/// Sets the learning rates of an optimizer's groups, of tessera::optim or torch::optim, which has
/// to outlive it. Making one sets those of the first step. Compiled steps read them: a schedule
/// makes no new program. It is called after a compiled step, not inside.
class LRScheduler {
 public:
  virtual ~LRScheduler() = default;
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  /// After optimizer.step(): sets the rates of the next one.
  void step();
  /// The rates that it has set, by group.
  const std::vector<double>& last_lr() const { return last_lr_; }
  /// "last_epoch", and by group "base_lr.0", "lr.0". Loading sets the groups' rates.
  std::map<std::string, double> state_dict() const;
  void load_state_dict(const std::map<std::string, double>& state);

 protected:
  LRScheduler(const char* name, torch::optim::Optimizer& optimizer);
  /// To be called at the end of constructors.
  void start();
  /// Of a group at `last_epoch()`, which has been counted up from 0; `lr` is what it has.
  virtual double next_lr(size_t group, double lr) = 0;

  const char* name() const { return name_; }
  torch::optim::Optimizer& optimizer() const { return optimizer_; }
  int64_t last_epoch() const { return last_epoch_; }
  double base_lr(size_t group) const { return base_lrs_[group]; }

 private:
  void update();

  const char* name_;
  torch::optim::Optimizer& optimizer_;
  int64_t last_epoch_ = 0;
  std::vector<double> base_lrs_, last_lr_;
};

/// From the groups' rates down to eta_min along half a cosine of T_max steps, and up again.
struct CosineAnnealingLROptions {
  int64_t T_max = 0;  // NOLINT(readability-identifier-naming): Python's name
  double eta_min = 0;
};
class CosineAnnealingLR final : public LRScheduler {
 public:
  CosineAnnealingLR(torch::optim::Optimizer& optimizer, CosineAnnealingLROptions options);

 private:
  double next_lr(size_t group, double lr) override;
  const CosineAnnealingLROptions options_;
};

/// From start_factor to end_factor times the groups' rates in total_iters steps.
struct LinearLROptions {
  double start_factor = 1.0 / 3, end_factor = 1;
  int64_t total_iters = 5;
};
class LinearLR final : public LRScheduler {
 public:
  explicit LinearLR(torch::optim::Optimizer& optimizer, LinearLROptions options = {});

 private:
  double next_lr(size_t group, double lr) override;
  const LinearLROptions options_;
};

/// One number for all groups, or one for each.
struct PerGroup {
  PerGroup(double value) : values{value} {}  // NOLINT(google-explicit-constructor)
  PerGroup(std::vector<double> given)
      : values(std::move(given)) {}  // NOLINT(google-explicit-constructor)
  std::vector<double> values;
};

/// Up to max_lr and down to almost 0 in total_steps, or epochs times steps_per_epoch; the momentum,
/// or the first of betas, the other way. A compiled step has the momentum as a constant: for those
/// leave it with cycle_momentum = false.
struct OneCycleLROptions {
  PerGroup max_lr = 0;
  std::optional<int64_t> total_steps = std::nullopt, epochs = std::nullopt,
                         steps_per_epoch = std::nullopt;
  double pct_start = 0.3;
  std::string anneal_strategy = "cos";  // or "linear"
  bool cycle_momentum = true;
  PerGroup base_momentum = 0.85, max_momentum = 0.95;
  double div_factor = 25, final_div_factor = 1e4;
  bool three_phase = false;
};
class OneCycleLR final : public LRScheduler {
 public:
  OneCycleLR(torch::optim::Optimizer& optimizer, OneCycleLROptions options);

 private:
  double next_lr(size_t group, double lr) override;
  OneCycleLROptions options_;
  int64_t total_steps_;
};

/// Up from 0 in num_warmup_steps, level, and down to min_lr_ratio times the groups' rates in the
/// last num_decay_steps of num_training_steps: a run is prolonged, or ended, at any step before.
struct WarmupStableDecayLROptions {
  int64_t num_warmup_steps = 0, num_decay_steps = 0, num_training_steps = 0;
  std::string decay_type = "linear";  // "cosine", "1-sqrt"
  double min_lr_ratio = 0;
};
class WarmupStableDecayLR final : public LRScheduler {
 public:
  WarmupStableDecayLR(torch::optim::Optimizer& optimizer, WarmupStableDecayLROptions options);

 private:
  double next_lr(size_t group, double lr) override;
  const WarmupStableDecayLROptions options_;
};

}  // namespace tessera::optim
