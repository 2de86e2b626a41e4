#include "nn/module_rows.h"

namespace tessera::testing {
namespace {

namespace options = torch::nn;

std::optional<at::IntArrayRef> output_size() {
  static constexpr int64_t kSize[] = {15};
  return at::IntArrayRef(kSize);
}

TEST(NnModules, ConvolutionsAsTorchs) {
  MODULE_ROW(Conv1d, (2, 3, 2), (input({2, 2, 7})));
  MODULE_ROW(Conv2d, (2, 3, 2), (input({2, 2, 5, 5})));
  MODULE_ROW(Conv3d, (2, 3, 2), (input({2, 2, 4, 4, 4})));
  MODULE_ROW(ConvTranspose1d, (2, 3, 2), (input({2, 2, 7})));
  MODULE_ROW(ConvTranspose2d, (2, 3, 2), (input({2, 2, 5, 5})));
  MODULE_ROW(ConvTranspose3d, (2, 3, 2), (input({2, 2, 4, 4, 4})));
  MODULE_ROW(ConvTranspose1d, (options::ConvTranspose1dOptions(2, 3, 2).stride(2)),
             (input({2, 2, 7}), output_size()));
  MODULE_ROW(Fold, (options::FoldOptions({4, 5}, {2, 2})), (input({2, 12, 12})));
  MODULE_ROW(Unfold, (options::UnfoldOptions({2, 2})), (input({2, 3, 4, 4})));
}

TEST(NnModules, LinearsAndEmbeddingsAsTorchs) {
  MODULE_ROW(Linear, (4, 3), (input({2, 4})));
  MODULE_ROW(Bilinear, (3, 4, 2), (input({2, 3}), input({2, 4})));
  MODULE_ROW(Identity, (), (input({2, 4})));
  MODULE_ROW(Flatten, (), (input({2, 3, 4})));
  MODULE_ROW(Unflatten, (options::UnflattenOptions(1, {2, 2})), (input({3, 4})));
  MODULE_ROW(Functional, (torch::relu), (input({2, 4})));
  MODULE_ROW(Embedding, (6, 3), (indices({2, 4}, 6)));
  MODULE_ROW(EmbeddingBag, (6, 3), (indices({2, 4}, 6)));
  MODULE_ROW(EmbeddingBag, (6, 3), (indices({5}, 6), at::tensor({0, 2}, at::kLong)));
}

TEST(NnModules, NormsAsTorchs) {
  MODULE_ROW(BatchNorm1d, (3), (input({4, 3})));
  MODULE_ROW(BatchNorm2d, (3), (input({4, 3, 2, 2})));
  MODULE_ROW(BatchNorm3d, (3), (input({4, 3, 2, 2, 2})));
  MODULE_ROW(InstanceNorm1d, (options::InstanceNorm1dOptions(3).affine(true)), (input({4, 3, 5})));
  MODULE_ROW(InstanceNorm2d, (options::InstanceNorm2dOptions(3).track_running_stats(true)),
             (input({4, 3, 2, 2})));
  MODULE_ROW(InstanceNorm3d, (3), (input({4, 3, 2, 2, 2})));
  MODULE_ROW(LayerNorm, (options::LayerNormOptions({4})), (input({3, 4})));
  MODULE_ROW(GroupNorm, (2, 4), (input({3, 4, 2})));
  MODULE_ROW(LocalResponseNorm, (2), (input({2, 4, 3, 3})));
  MODULE_ROW(CrossMapLRN2d, (2), (input({2, 4, 3, 3})));
}

TEST(NnModules, PaddingsAndReshapesAsTorchs) {
  MODULE_ROW(ConstantPad1d, (2, 3.5), (input({2, 3, 5})));
  MODULE_ROW(ConstantPad2d, (2, 3.5), (input({2, 3, 5, 5})));
  MODULE_ROW(ConstantPad3d, (2, 3.5), (input({2, 3, 5, 5, 5})));
  MODULE_ROW(ReflectionPad1d, (2), (input({2, 3, 5})));
  MODULE_ROW(ReflectionPad2d, (2), (input({2, 3, 5, 5})));
  MODULE_ROW(ReflectionPad3d, (2), (input({2, 3, 5, 5, 5})));
  MODULE_ROW(ReplicationPad1d, (2), (input({2, 3, 5})));
  MODULE_ROW(ReplicationPad2d, (2), (input({2, 3, 5, 5})));
  MODULE_ROW(ReplicationPad3d, (2), (input({2, 3, 5, 5, 5})));
  MODULE_ROW(ZeroPad1d, (2), (input({2, 3, 5})));
  MODULE_ROW(ZeroPad2d, (2), (input({2, 3, 5, 5})));
  MODULE_ROW(ZeroPad3d, (2), (input({2, 3, 5, 5, 5})));
  MODULE_ROW(PixelShuffle, (2), (input({2, 8, 3, 3})));
  MODULE_ROW(PixelUnshuffle, (2), (input({2, 2, 4, 4})));
  MODULE_ROW(Upsample, (options::UpsampleOptions().scale_factor(std::vector<double>({2.0}))),
             (input({2, 3, 4})));
}

}  // namespace
}  // namespace tessera::testing
