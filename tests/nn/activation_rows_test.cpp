#include "nn/module_rows.h"

namespace tessera::testing {
namespace {

namespace options = torch::nn;

TEST(NnModules, ActivationsAsTorchs) {
  MODULE_ROW(ELU, (), (input({3, 4})));
  MODULE_ROW(SELU, (), (input({3, 4})));
  MODULE_ROW(CELU, (), (input({3, 4})));
  MODULE_ROW(GELU, (), (input({3, 4})));
  MODULE_ROW(GLU, (), (input({3, 4})));
  MODULE_ROW(Hardshrink, (), (input({3, 4})));
  MODULE_ROW(Hardtanh, (), (input({3, 4})));
  MODULE_ROW(LeakyReLU, (), (input({3, 4})));
  MODULE_ROW(LogSigmoid, (), (input({3, 4})));
  MODULE_ROW(LogSoftmax, (1), (input({3, 4})));
  MODULE_ROW(Mish, (), (input({3, 4})));
  MODULE_ROW(PReLU, (), (input({3, 4})));
  MODULE_ROW(RReLU, (), (input({3, 4})));
  MODULE_ROW(ReLU, (), (input({3, 4})));
  MODULE_ROW(ReLU6, (), (input({3, 4})));
  MODULE_ROW(SiLU, (), (input({3, 4})));
  MODULE_ROW(Sigmoid, (), (input({3, 4})));
  MODULE_ROW(Softmax, (1), (input({3, 4})));
  MODULE_ROW(Softmax2d, (), (input({2, 3, 4, 4})));
  MODULE_ROW(Softmin, (1), (input({3, 4})));
  MODULE_ROW(Softplus, (), (input({3, 4})));
  MODULE_ROW(Softshrink, (), (input({3, 4})));
  MODULE_ROW(Softsign, (), (input({3, 4})));
  MODULE_ROW(Tanh, (), (input({3, 4})));
  MODULE_ROW(Tanhshrink, (), (input({3, 4})));
  MODULE_ROW(Threshold, (0.1, 20), (input({3, 4})));
}

TEST(NnModules, DropoutsDrawAsTorchs) {
  MODULE_ROW(AlphaDropout, (0.5), (input({3, 4})));
  MODULE_ROW(Dropout, (0.5), (input({3, 4})));
  MODULE_ROW(Dropout2d, (0.5), (input({2, 3, 4, 4})));
  MODULE_ROW(Dropout3d, (0.5), (input({2, 3, 4, 4, 4})));
  MODULE_ROW(FeatureAlphaDropout, (0.5), (input({3, 4, 4})));
}

TEST(NnModules, LossesAsTorchs) {
  MODULE_ROW(BCELoss, (), (input({3, 4}).sigmoid(), input({3, 4}).sigmoid()));
  MODULE_ROW(BCEWithLogitsLoss, (), (input({3, 4}), input({3, 4}).sigmoid()));
  MODULE_ROW(CTCLoss, (),
             (input({8, 2, 5}).log_softmax(2), indices({2, 3}, 4) + 1, at::full({2}, 8, at::kLong),
              at::full({2}, 3, at::kLong)));
  MODULE_ROW(CosineEmbeddingLoss, (), (input({3, 4}), input({3, 4}).cos(), at::ones({3})));
  MODULE_ROW(CosineSimilarity, (), (input({3, 4}), input({3, 4}).cos()));
  MODULE_ROW(CrossEntropyLoss, (), (input({3, 4}), indices({3}, 4)));
  MODULE_ROW(HingeEmbeddingLoss, (), (input({3, 4}), input({3, 4}).sign()));
  MODULE_ROW(HuberLoss, (), (input({3, 4}), input({3, 4}).cos()));
  MODULE_ROW(KLDivLoss, (), (input({3, 4}), input({3, 4}).sigmoid()));
  MODULE_ROW(L1Loss, (), (input({3, 4}), input({3, 4}).cos()));
  MODULE_ROW(MSELoss, (), (input({3, 4}), input({3, 4}).cos()));
  MODULE_ROW(MarginRankingLoss, (), (input({3}), input({3}).cos(), at::ones({3})));
  MODULE_ROW(MultiLabelMarginLoss, (), (input({3, 4}), indices({3, 4}, 4)));
  MODULE_ROW(MultiLabelSoftMarginLoss, (), (input({3, 4}), indices({3, 4}, 2)));
  MODULE_ROW(MultiMarginLoss, (), (input({3, 4}), indices({3}, 4)));
  MODULE_ROW(NLLLoss, (), (input({3, 4}), indices({3}, 4)));
  MODULE_ROW(PairwiseDistance, (), (input({3, 4}), input({3, 4}).cos()));
  MODULE_ROW(PoissonNLLLoss, (), (input({3, 4}), input({3, 4}).abs()));
  MODULE_ROW(SmoothL1Loss, (), (input({3, 4}), input({3, 4}).cos()));
  MODULE_ROW(SoftMarginLoss, (), (input({3, 4}), input({3, 4}).sign()));
  MODULE_ROW(TripletMarginLoss, (), (input({3, 4}), input({3, 4}).cos(), input({3, 4}).sin()));
  MODULE_ROW(TripletMarginWithDistanceLoss, (),
             (input({3, 4}), input({3, 4}).cos(), input({3, 4}).sin()));
  MODULE_ROW(AdaptiveLogSoftmaxWithLoss,
             (options::AdaptiveLogSoftmaxWithLossOptions(16, 20, {5, 10})),
             (input({3, 16}), indices({3}, 20)));
}

}  // namespace
}  // namespace tessera::testing
