#include <tessera/nn/decoder_layers.h>

#include "fully_shard/collect.h"
#include "nn/composable.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <cmath>
#include <string>
#include <vector>

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
  if (auto* rectifier = dynamic_cast<PReLUImpl*>(&module)) {
    rectifier->weight.fill_(rectifier->options.init());
    return true;
  }
  if (dynamic_cast<MultiheadAttentionImpl*>(&module) != nullptr) return true;  // reset_attention()
  return reset_as<LinearImpl, BilinearImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl,
                  ConvTranspose2dImpl, ConvTranspose3dImpl, EmbeddingImpl, EmbeddingBagImpl,
                  LayerNormImpl, GroupNormImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
                  InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl, RNNImpl, LSTMImpl,
                  GRUImpl, RNNCellImpl, LSTMCellImpl, GRUCellImpl, tessera::nn::RMSNormImpl,
                  tessera::nn::RotaryEmbeddingImpl>(module);
}

struct MadeTensor {
  std::string name;
  at::Tensor tensor;
  int64_t version;  // when it got memory
};
/// A module that was built without memory, and what it has got.
struct Made {
  torch::nn::Module* module;
  std::string where;  // "Block 'blocks.0'"
  std::vector<MadeTensor> tensors = {};
};

at::Tensor unwritten_like(const at::Tensor& tensor, c10::Device device) {
  auto made = at::empty_like(tensor, tensor.options().device(device));
  // Of what is left so, was_written() tells.
  if (made.is_floating_point() || made.is_complex()) made.fill_(std::nan(""));
  return made;
}

/// By what it holds, since writes through data() are not counted; integers have nothing that they
/// could not be.
bool was_written(const MadeTensor& made) {
  const auto& tensor = made.tensor;
  const bool has_nan = tensor.is_floating_point() || tensor.is_complex();
  return tensor.numel() == 0 || tensor._version() > made.version ||
         (has_nan && !tensor.isnan().all().item<bool>());
}

std::string names_of(const std::vector<MadeTensor>& tensors) {
  std::string names;
  for (const auto& made : tensors) names += (names.empty() ? "'" : ", '") + made.name + "'";
  return names;
}

void give_memory(const std::string& name, const at::Tensor& tensor, c10::Device device,
                 Made& made) {
  if (!tensor.defined() || !tensor.is_meta()) return;
  tensor.unsafeGetTensorImpl()->shallow_copy_from(unwritten_like(tensor, device).getIntrusivePtr());
  made.tensors.push_back({name, tensor, tensor._version()});
}

Made give_memory(torch::nn::Module& part, const std::string& path, c10::Device device) {
  Made made{.module = &part, .where = nn::name_of(part)};
  if (!path.empty()) made.where += " '" + path.substr(0, path.size() - 1) + "'";
  for (const auto& item : part.named_parameters(/*recurse=*/false))
    give_memory(item.key(), item.value(), device, made);
  for (const auto& item : part.named_buffers(/*recurse=*/false))
    give_memory(item.key(), item.value(), device, made);
  return made;
}

/// After its out_proj has started as every Linear does, whose bias it sets.
void reset_attention(torch::nn::Module& module) {
  if (auto* attention = dynamic_cast<torch::nn::MultiheadAttentionImpl*>(&module))
    attention->_reset_parameters();
}

void check_written(const Made& made) {
  for (const auto& one : made.tensors) {
    TORCH_CHECK_VALUE(was_written(one), "fully_shard: expected param_init_fn to give values to '",
                      one.name, "' of ", made.where,
                      ", which was built without memory, but it wrote none; it is called with each "
                      "such module, and those that are not torch::nn's have no others");
  }
}

}  // namespace

void materialise(const std::vector<torch::nn::Module*>& modules, const Ignored& ignored,
                 const FullyShardOptions& options, c10::Device device) {
  const at::NoGradGuard no_grad;
  std::vector<Made> all;
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string& path) {
      auto made = give_memory(part, path, device);
      if (made.tensors.empty()) return;
      TORCH_CHECK_VALUE(reset_known(part) || options.param_init_fn, "fully_shard: ", made.where,
                        " has parameters or buffers without memory (on the meta device): ",
                        names_of(made.tensors),
                        "; how they start is not known for modules that are not torch::nn's: pass "
                        "param_init_fn, which is called with each such module");
      all.push_back(std::move(made));
    });
  }
  for (const auto& made : all) reset_attention(*made.module);
  if (!options.param_init_fn) return;
  // When all have memory: it may write to the parts of the module that it is called with.
  for (const auto& made : all) options.param_init_fn(*made.module);
  for (const auto& made : all) check_written(made);
}

}  // namespace tessera::sharded
