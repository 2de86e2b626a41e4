#include "train/schedule.h"

#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tessera::train {

double schedule_position(const Settings& settings, int64_t step, double elapsed_seconds) {
  const auto done = static_cast<double>(step);
  if (settings.minutes == 0) return done;
  return std::max(done,
                  elapsed_seconds / (60 * settings.minutes) * static_cast<double>(settings.steps));
}

std::string stopped_by_time(const Settings& settings, int64_t step, const std::string& folder) {
  return "stopped after " + tool::number_text(settings.minutes) +
         (settings.minutes == 1 ? " minute" : " minutes") + ", as --minutes asks, at step " +
         std::to_string(step) + " of " + std::to_string(settings.steps) +
         (folder.empty() ? "" : "; go on with --resume --run " + folder + " --minutes MORE");
}

double learning_rate(const Settings& settings, double position) {
  const auto warmup = static_cast<double>(settings.warmup);
  if (position < warmup) return settings.lr * std::min(position + 1, warmup) / warmup;
  const double length = std::max(1.0, static_cast<double>(settings.steps) - warmup);
  const double passed = std::min(position - warmup, length);
  const double cosine = std::cos(std::numbers::pi * passed / length);
  return settings.min_lr + (settings.lr - settings.min_lr) * (1 + cosine) / 2;
}

namespace {

std::optional<at::ScalarType> state_dtype_of(const Settings& settings) {
  if (settings.optimizer_state == "bf16") return at::kBFloat16;
  if (settings.optimizer_state == "int8") return at::kByte;
  return std::nullopt;
}

/// Of the group of matrices, and of that of vectors.
std::vector<optim::AdamWOptions> options_of(const Settings& settings) {
  const optim::AdamWOptions matrices{.lr = settings.lr,
                                     .betas = {settings.beta1, settings.beta2},
                                     .weight_decay = settings.weight_decay,
                                     .fused = !state_dtype_of(settings),
                                     .state_dtype = state_dtype_of(settings)};
  auto vectors = matrices;
  vectors.weight_decay = 0;
  return {matrices, vectors};
}

}  // namespace

optim::AdamW make_optimizer(const torch::nn::Module& model, const Settings& settings) {
  std::vector<at::Tensor> matrices, vectors;
  for (const auto& parameter : model.parameters()) {
    if (parameter.requires_grad()) (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  }
  const auto options = options_of(settings);
  return optim::AdamW(
      {optim::param_group(matrices, options[0]), optim::param_group(vectors, options[1])},
      options[0]);
}

void set_options(optim::AdamW& optimizer, const Settings& settings) {
  const auto options = options_of(settings);
  for (size_t group = 0; group < options.size(); ++group) optimizer.options(group) = options[group];
}

void set_learning_rate(optim::AdamW& optimizer, double rate) {
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group)
    optimizer.options(group).lr = rate;
}

}  // namespace tessera::train
