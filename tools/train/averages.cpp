#include "train/averages.h"

#include <c10/util/Exception.h>
#include <torch/utils.h>

namespace tessera::train {

std::unique_ptr<optim::ExponentialMovingAverage> make_average(const LanguageModel& model,
                                                              const Settings& settings) {
  if (settings.ema == 0) return nullptr;
  return std::make_unique<optim::ExponentialMovingAverage>(
      model.module(), optim::ExponentialMovingAverageOptions{.decay = settings.ema});
}

std::shared_ptr<torch::nn::Module> module_with(const LanguageModel& model,
                                               optim::ExponentialMovingAverage* average) {
  const auto module = model.module();
  if (average == nullptr) return module;
  TORCH_INTERNAL_ASSERT(module->parameters(/*recurse=*/false).empty() &&
                        module->buffers(/*recurse=*/false).empty());
  auto both = std::make_shared<torch::nn::Module>("model with averages");
  for (const auto& child : module->named_children())
    both->register_module(child.key(), child.value());
  both->register_module("ema", average->module().shared_from_this());
  return both;
}

void take_averages(LanguageModel& model, optim::ExponentialMovingAverage& average) {
  const torch::NoGradGuard no_grad;
  const auto averages = average.module().named_parameters();
  for (auto& parameter : model.module()->named_parameters())
    parameter.value().copy_(averages["module." + parameter.key()]);
}

}  // namespace tessera::train
