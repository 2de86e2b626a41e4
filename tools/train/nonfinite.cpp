#include "train/nonfinite.h"

#include <tessera/comm.h>

#include <ATen/ops/isfinite.h>

namespace tessera::train {

std::optional<std::string> find_nonfinite(Gpt& model, TrainStep& step,
                                          const std::vector<Batch>& batches) {
  std::string first;
  std::vector<HookHandle> handles;
  for (const auto& module : model->named_modules()) {
    if (!is_hookable(*module.value())) continue;
    const auto name = module.key().empty() ? "the model" : module.key();
    handles.push_back(register_forward_hook(
        *module.value(), [&first, name](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
          if (!first.empty()) return;
          for (const auto& output : result.tensors()) {
            if (!at::isfinite(output).all().item<bool>()) first = name;
          }
        }));
  }
  for (const auto& batch : batches) {
    const auto loss = step.evaluate(batch);
    if (first.empty() && !at::isfinite(loss).item<bool>()) first = "the loss";
  }
  for (auto& handle : handles) handle.remove();

  const auto all = gather_bytes(first);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) return all[rank] + " on rank " + std::to_string(rank);
  }
  return std::nullopt;
}

}  // namespace tessera::train
