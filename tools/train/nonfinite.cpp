#include "train/nonfinite.h"

#include <tessera/comm.h>

#include "train/random_state.h"

#include <ATen/ops/isfinite.h>
#include <torch/utils.h>

namespace tessera::train {
namespace {

/// What modules write down in forward is as before after its scope.
class KeptBuffers {
 public:
  explicit KeptBuffers(const torch::nn::Module& model) : buffers_(model.buffers()) {
    for (const auto& buffer : buffers_) kept_.push_back(buffer.clone());
  }
  ~KeptBuffers() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(kept_[i]);
  }
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  std::vector<at::Tensor> buffers_, kept_;
};

}  // namespace

std::optional<std::string> find_nonfinite(Gpt& model, TrainStep& step,
                                          const std::vector<Batch>& batches) {
  const KeptRandomState random(model->parameters().front().device());
  const KeptBuffers buffers(*model);
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
