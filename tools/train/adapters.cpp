#include "train/adapters.h"

#include <tessera/lora.h>

#include <c10/util/Exception.h>
#include <torch/utils.h>

#include <algorithm>
#include <unordered_set>

namespace tessera::train {
namespace {

constexpr uint64_t kSeedOfAdapters = 0xA0761D6478BD642F;  // far from those of modules

}  // namespace

void add_adapters(LanguageModel& model, const Settings& settings) {
  if (settings.lora == 0) return;
  std::unordered_set<const torch::nn::Module*> in_blocks;
  for (const auto& block : model.blocks()) {
    for (const auto& module : block->modules()) in_blocks.insert(module.get());
  }
  LoraOptions options{.rank = settings.lora,
                      .alpha = settings.lora_alpha > 0 ? settings.lora_alpha
                                                       : 2 * static_cast<double>(settings.lora),
                      .dropout = settings.lora_dropout,
                      .targets = settings.lora_targets};
  // The head is no layer that the loss calls.
  options.filter = [&](const std::string&, const torch::nn::LinearImpl& layer) {
    return in_blocks.contains(&layer);
  };
  for (const auto& target : settings.lora_targets) {
    const auto modules = model.module()->named_modules();
    const auto is_named = [&](const auto& item) {
      return item.key() == target || item.key().ends_with("." + target);
    };
    const auto is_outside = [&](const auto& item) {
      return is_named(item) && !in_blocks.contains(item.value().get());
    };
    TORCH_CHECK_VALUE(std::none_of(modules.begin(), modules.end(), is_outside),
                      "--lora-targets: expected layers of blocks, got '", target,
                      "', which lies outside of them; leave it out");
  }
  // Whatever was drawn before, which hangs on the layout.
  torch::manual_seed(settings.seed + kSeedOfAdapters);
  try {
    lora(model.module(), options);
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, "--lora: ", error.what_without_backtrace());
  }
}

}  // namespace tessera::train
