#include "train/schedule.h"

#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <unordered_set>
#include <utility>
#include <vector>

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

/// Which groups there are: of Muon's matrices, of other matrices, and of vectors.
enum class Group { Muons, Matrices, Vectors };
std::vector<Group> groups_of(const Settings& settings) {
  if (settings.optimizer == "muon") return {Group::Muons, Group::Matrices, Group::Vectors};
  return {Group::Matrices, Group::Vectors};
}

optim::MuonOptions muon_options(const Settings& settings) {
  return {.lr = settings.lr,
          .weight_decay = settings.weight_decay,
          .adjust_lr_fn = "match_rms_adamw"};  // the rate is AdamW's as well
}

optim::AdamWOptions adamw_options(const Settings& settings, Group group) {
  return {.lr = settings.lr,
          .betas = {settings.beta1, settings.beta2},
          .weight_decay = group == Group::Vectors ? 0 : settings.weight_decay,
          .fused = settings.optimizer_state == "fp32",
          .state_dtype = state_dtype_of(settings)};
}

optim::ParamGroup group_of(std::vector<at::Tensor> parameters, const Settings& settings,
                           Group group) {
  if (group == Group::Muons)
    return optim::param_group(std::move(parameters), muon_options(settings));
  return optim::param_group(std::move(parameters), adamw_options(settings, group));
}

}  // namespace

std::unique_ptr<optim::Optimizer> make_optimizer(const LanguageModel& model,
                                                 const Settings& settings) {
  std::unordered_set<const c10::TensorImpl*> in_blocks;
  for (const auto& block : model.blocks())
    for (const auto& parameter : block->parameters())
      in_blocks.insert(parameter.unsafeGetTensorImpl());
  std::map<Group, std::vector<at::Tensor>> parameters;
  for (const auto& parameter : model.module()->parameters()) {
    if (!parameter.requires_grad()) continue;
    const bool is_muons = settings.optimizer == "muon" && parameter.dim() == 2 &&
                          in_blocks.count(parameter.unsafeGetTensorImpl()) > 0;
    const auto group = is_muons              ? Group::Muons
                       : parameter.dim() > 1 ? Group::Matrices
                                             : Group::Vectors;
    parameters[group].push_back(parameter);
  }
  std::vector<optim::ParamGroup> groups;
  for (const auto group : groups_of(settings))
    groups.push_back(group_of(parameters[group], settings, group));
  if (settings.optimizer == "muon")
    return std::make_unique<optim::Muon>(groups, muon_options(settings));
  return std::make_unique<optim::AdamW>(groups, adamw_options(settings, Group::Matrices));
}

bool decides_on_device(const Settings& settings) {
  return settings.optimizer == "adamw" && settings.optimizer_state == "fp32";
}

void set_options(optim::Optimizer& optimizer, const Settings& settings) {
  const auto groups = groups_of(settings);
  for (size_t i = 0; i < groups.size(); ++i)
    optimizer.param_groups()[i].set_options(group_of({}, settings, groups[i]).options().clone());
}

void set_learning_rate(optim::Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
}

}  // namespace tessera::train
