// The classes of torch::nn: what their objects are made of, for guards.
#include "compiler/record/guards.h"

#include <ATen/core/Tensor.h>
#include <c10/util/hash.h>
#include <torch/nn/modules.h>

#include <array>
#include <optional>
#include <typeindex>
#include <unordered_map>

namespace tessera::compiler {
namespace library {

using namespace torch::nn;

template <class... M>
struct Classes {};

/// One row per class; a module of any other is known by its training mode alone.
using LibraryClasses =
    Classes<AdaptiveAvgPool1dImpl, AdaptiveAvgPool2dImpl, AdaptiveAvgPool3dImpl,
            AdaptiveLogSoftmaxWithLossImpl, AdaptiveMaxPool1dImpl, AdaptiveMaxPool2dImpl,
            AdaptiveMaxPool3dImpl, AlphaDropoutImpl, AvgPool1dImpl, AvgPool2dImpl, AvgPool3dImpl,
            BCELossImpl, BCEWithLogitsLossImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
            BilinearImpl, CELUImpl, CTCLossImpl, ConstantPad1dImpl, ConstantPad2dImpl,
            ConstantPad3dImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl,
            ConvTranspose2dImpl, ConvTranspose3dImpl, CosineEmbeddingLossImpl, CosineSimilarityImpl,
            CrossEntropyLossImpl, CrossMapLRN2dImpl, DropoutImpl, Dropout2dImpl, Dropout3dImpl,
            ELUImpl, EmbeddingImpl, EmbeddingBagImpl, FeatureAlphaDropoutImpl, FlattenImpl,
            FoldImpl, FractionalMaxPool2dImpl, FractionalMaxPool3dImpl, FunctionalImpl, GELUImpl,
            GLUImpl, GRUImpl, GRUCellImpl, GroupNormImpl, HardshrinkImpl, HardtanhImpl,
            HingeEmbeddingLossImpl, HuberLossImpl, IdentityImpl, InstanceNorm1dImpl,
            InstanceNorm2dImpl, InstanceNorm3dImpl, KLDivLossImpl, L1LossImpl, LPPool1dImpl,
            LPPool2dImpl, LPPool3dImpl, LSTMImpl, LSTMCellImpl, LayerNormImpl, LeakyReLUImpl,
            LinearImpl, LocalResponseNormImpl, LogSigmoidImpl, LogSoftmaxImpl, MSELossImpl,
            MarginRankingLossImpl, MaxPool1dImpl, MaxPool2dImpl, MaxPool3dImpl, MaxUnpool1dImpl,
            MaxUnpool2dImpl, MaxUnpool3dImpl, MishImpl, ModuleDictImpl, ModuleListImpl,
            MultiLabelMarginLossImpl, MultiLabelSoftMarginLossImpl, MultiMarginLossImpl,
            MultiheadAttentionImpl, NLLLossImpl, PReLUImpl, PairwiseDistanceImpl, ParameterDictImpl,
            ParameterListImpl, PixelShuffleImpl, PixelUnshuffleImpl, PoissonNLLLossImpl, RNNImpl,
            RNNCellImpl, RReLUImpl, ReLUImpl, ReLU6Impl, ReflectionPad1dImpl, ReflectionPad2dImpl,
            ReflectionPad3dImpl, ReplicationPad1dImpl, ReplicationPad2dImpl, ReplicationPad3dImpl,
            SELUImpl, SequentialImpl, SiLUImpl, SigmoidImpl, SmoothL1LossImpl, SoftMarginLossImpl,
            SoftmaxImpl, Softmax2dImpl, SoftminImpl, SoftplusImpl, SoftshrinkImpl, SoftsignImpl,
            TanhImpl, TanhshrinkImpl, ThresholdImpl, TransformerImpl, TransformerDecoderImpl,
            TransformerDecoderLayerImpl, TransformerEncoderImpl, TransformerEncoderLayerImpl,
            TripletMarginLossImpl, TripletMarginWithDistanceLossImpl, UnflattenImpl, UnfoldImpl,
            UpsampleImpl, ZeroPad1dImpl, ZeroPad2dImpl, ZeroPad3dImpl>;

// Options that own memory, which the bytes of the object do not show.

template <class T>
uint64_t hash_of(const std::vector<T>& values) {
  return c10::hash<std::vector<T>>()(values);
}
template <class T>
uint64_t hash_of(const std::optional<std::vector<T>>& values) {
  return values ? hash_of(*values) : 0;
}
inline uint64_t contents_of(const LayerNormImpl& module) {
  return hash_of(module.options.normalized_shape());
}
inline uint64_t contents_of(const AdaptiveLogSoftmaxWithLossImpl& module) {
  return hash_of(module.options.cutoffs());
}
inline uint64_t contents_of(const UnflattenImpl& module) { return hash_of(module.options.sizes()); }
inline uint64_t contents_of(const UpsampleImpl& module) {
  return c10::hash_combine(hash_of(module.options.size()), hash_of(module.options.scale_factor()));
}

struct Row {
  const std::type_info& type;
  std::optional<LibraryModule> (*find)(const torch::nn::Module&);
};

template <class M>
std::optional<LibraryModule> find_as(const torch::nn::Module& module) {
  const auto* found = dynamic_cast<const M*>(&module);
  if (found == nullptr) return std::nullopt;
  LibraryModule known{.object = std::as_bytes(std::span(found, 1))};
  if constexpr (requires { contents_of(*found); }) {
    known.contents = [](const torch::nn::Module& of) -> uint64_t {
      return contents_of(dynamic_cast<const M&>(of));
    };
  }
  return known;
}

template <class... M>
constexpr std::array<Row, sizeof...(M)> rows_of(Classes<M...> /*all*/) {
  return {Row{typeid(M), find_as<M>}...};
}

}  // namespace library

std::optional<LibraryModule> find_library_module(const torch::nn::Module& module) {
  using library::Row;
  static const auto kRows = library::rows_of(library::LibraryClasses());
  static const auto kByType = [] {
    std::unordered_map<std::type_index, const Row*> found;
    for (const auto& row : kRows) found.emplace(row.type, &row);
    return found;
  }();
  if (const auto known = kByType.find(typeid(module)); known != kByType.end())
    return known->second->find(module);
  for (const auto& row : kRows) {  // a class that derives from one of them
    if (auto found = row.find(module)) return found;
  }
  return std::nullopt;
}

}  // namespace tessera::compiler
