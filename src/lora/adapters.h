#pragma once

#include <tessera/lora.h>
#include <tessera/nn/hooks.h>

#include "nn/composable.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <vector>

/// What lora() leaves with a layer.
namespace tessera::detail::lora {

inline constexpr const char* kName = "lora";
inline constexpr const char* kA = "lora_A";
inline constexpr const char* kB = "lora_B";

/// One of the two matrices. No Linear: nobody else shall adapt it, or compute it in 8 bits.
class LoraMatrixImpl : public torch::nn::Module {
 public:
  explicit LoraMatrixImpl(const at::Tensor& values);
  at::Tensor weight;
};

struct LoraLayer final : nn::ComposableState {
  std::shared_ptr<LoraMatrixImpl> a, b;
  int64_t rank = 0;
  double alpha = 0, dropout = 0;
  bool rslora = false;
  bool is_merged = false;
  HookHandle hook;

  double scale() const;
  std::string why_not_saved() const override {
    if (!is_merged) return {};
    return "adapters that are not merged, for weights that have them are given them again by who "
           "loads; unmerge_lora before, or remove_lora";
  }
};

/// A layer that has an adapter, and its dotted name.
struct AdaptedLayer {
  std::string name;
  torch::nn::LinearImpl* layer;
  std::shared_ptr<LoraLayer> state;
};
/// In the order of the modules; each once.
std::vector<AdaptedLayer> adapted_layers(torch::nn::Module& module);
/// The same; throws a ValueError if there is none.
std::vector<AdaptedLayer> require_adapted(const char* function, torch::nn::Module& module);

/// "q_proj.lora_A.weight".
std::string parameter_name(const AdaptedLayer& layer, const char* matrix);

/// Names of the parameters of adapters.
std::vector<std::string> adapter_names(torch::nn::Module& module);

/// Whether a pattern names a layer: all of its name, or what is behind a dot in it.
bool is_target(const std::string& pattern, const std::string& name);

}  // namespace tessera::detail::lora
