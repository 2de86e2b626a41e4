#include "fully_shard/collect.h"
#include "nn/composable.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

namespace tessera::sharded {
namespace {

/// Calls a member that torch::nn's modules have without a common base for it.
template <class... Modules>
bool reset_as(torch::nn::Module& module) {
  const auto reset = [&]<class M>() {
    auto* known = dynamic_cast<M*>(&module);
    if (known != nullptr) known->reset_parameters();
    return known != nullptr;
  };
  return (reset.template operator()<Modules>() || ...);
}

bool reset_known(torch::nn::Module& module) {
  using namespace torch::nn;
  return reset_as<LinearImpl, BilinearImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl,
                  ConvTranspose2dImpl, ConvTranspose3dImpl, EmbeddingImpl, EmbeddingBagImpl,
                  LayerNormImpl, GroupNormImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
                  InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl, RNNImpl, LSTMImpl,
                  GRUImpl, RNNCellImpl, LSTMCellImpl, GRUCellImpl>(module);
}

void give_memory(at::Tensor& tensor, c10::Device device, bool& had_none) {
  if (!tensor.defined() || !tensor.is_meta()) return;
  had_none = true;
  const auto made = at::empty_like(tensor, tensor.options().device(device));
  tensor.unsafeGetTensorImpl()->shallow_copy_from(made.getIntrusivePtr());
}

void materialise_part(torch::nn::Module& part, const std::string& path,
                      const FullyShardOptions& options, c10::Device device) {
  bool had_none = false;
  for (auto& item : part.named_parameters(/*recurse=*/false))
    give_memory(item.value(), device, had_none);
  for (auto& item : part.named_buffers(/*recurse=*/false))
    give_memory(item.value(), device, had_none);
  if (!had_none) return;
  if (options.param_init_fn) return options.param_init_fn(part);
  TORCH_CHECK_VALUE(reset_known(part), "fully_shard: ", nn::name_of(part),
                    path.empty() ? "" : " '" + path.substr(0, path.size() - 1) + "'",
                    " has parameters without memory (on the meta device), and how they start is "
                    "not known for modules that are not torch::nn's; pass param_init_fn, which is "
                    "called with each such module");
}

}  // namespace

void materialise(const std::vector<torch::nn::Module*>& modules, const Ignored& ignored,
                 const FullyShardOptions& options, c10::Device device) {
  const at::NoGradGuard no_grad;
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string& path) {
      materialise_part(part, path, options, device);
    });
  }
}

}  // namespace tessera::sharded
