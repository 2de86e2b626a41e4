#include "checkpoint/running_statistics.h"

#include <tessera/checkpoint/kept_call.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <algorithm>
#include <array>

namespace tessera::recompute {
namespace {

constexpr std::array kNames = {"running_mean", "running_var", "num_batches_tracked"};

bool is_statistic(const std::string& name) {
  return std::ranges::any_of(kNames, [&](const char* known) { return name == known; });
}

}  // namespace

RunningStatistics::RunningStatistics(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  module.apply([&](const torch::nn::Module& part) {
    if (!part.is_training()) return;
    for (const auto& item : part.named_buffers(/*recurse=*/false)) {
      if (item.value().defined() && is_statistic(item.key()))
        kept_.push_back({item.value(), item.value().clone()});
    }
  });
}

RunningStatistics::~RunningStatistics() {
  const at::NoGradGuard no_grad;
  // Past the version counter: autograd has saved the buffers, whose values it does not read.
  for (const auto& [buffer, values] : kept_) buffer.variable_data().copy_(values);
}

ScopeFactory keep_running_statistics(const torch::nn::Module& module) {
  return [&module] { return std::make_shared<RunningStatistics>(module); };
}

}  // namespace tessera::recompute
