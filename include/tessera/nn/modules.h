#pragma once

#include <tessera/detail/nn/default_arguments.h>
#include <tessera/detail/nn/parameter_containers.h>
#include <tessera/detail/nn/sequential.h>

/// tessera::nn::X: torch::nn::X, hookable. Options, functional forms and the Impl classes stay
/// torch::nn's. Modules that torch's own code calls, such as the layers inside a Transformer, run
/// no hooks.
namespace tessera::nn {

#define TESSERA_NN_MODULE(Name) \
  using torch::nn::Name##Impl;  \
  TESSERA_MODULE(Name)

TESSERA_NN_MODULE(AdaptiveAvgPool1d);
TESSERA_NN_MODULE(AdaptiveAvgPool2d);
TESSERA_NN_MODULE(AdaptiveAvgPool3d);
TESSERA_NN_MODULE(AdaptiveLogSoftmaxWithLoss);
TESSERA_NN_MODULE(AdaptiveMaxPool1d);
TESSERA_NN_MODULE(AdaptiveMaxPool2d);
TESSERA_NN_MODULE(AdaptiveMaxPool3d);
TESSERA_NN_MODULE(AlphaDropout);
TESSERA_NN_MODULE(AvgPool1d);
TESSERA_NN_MODULE(AvgPool2d);
TESSERA_NN_MODULE(AvgPool3d);
TESSERA_NN_MODULE(BCELoss);
TESSERA_NN_MODULE(BCEWithLogitsLoss);
TESSERA_NN_MODULE(BatchNorm1d);
TESSERA_NN_MODULE(BatchNorm2d);
TESSERA_NN_MODULE(BatchNorm3d);
TESSERA_NN_MODULE(Bilinear);
TESSERA_NN_MODULE(CELU);
TESSERA_NN_MODULE(CTCLoss);
TESSERA_NN_MODULE(ConstantPad1d);
TESSERA_NN_MODULE(ConstantPad2d);
TESSERA_NN_MODULE(ConstantPad3d);
TESSERA_NN_MODULE(Conv1d);
TESSERA_NN_MODULE(Conv2d);
TESSERA_NN_MODULE(Conv3d);
TESSERA_NN_MODULE(ConvTranspose1d);
TESSERA_NN_MODULE(ConvTranspose2d);
TESSERA_NN_MODULE(ConvTranspose3d);
TESSERA_NN_MODULE(CosineEmbeddingLoss);
TESSERA_NN_MODULE(CosineSimilarity);
TESSERA_NN_MODULE(CrossEntropyLoss);
TESSERA_NN_MODULE(CrossMapLRN2d);
TESSERA_NN_MODULE(Dropout);
TESSERA_NN_MODULE(Dropout2d);
TESSERA_NN_MODULE(Dropout3d);
TESSERA_NN_MODULE(ELU);
TESSERA_NN_MODULE(FeatureAlphaDropout);
TESSERA_NN_MODULE(Flatten);
TESSERA_NN_MODULE(Fold);
TESSERA_NN_MODULE(FractionalMaxPool2d);
TESSERA_NN_MODULE(FractionalMaxPool3d);
TESSERA_NN_MODULE(Functional);
TESSERA_NN_MODULE(GELU);
TESSERA_NN_MODULE(GLU);
TESSERA_NN_MODULE(GRU);
TESSERA_NN_MODULE(GRUCell);
TESSERA_NN_MODULE(GroupNorm);
TESSERA_NN_MODULE(Hardshrink);
TESSERA_NN_MODULE(Hardtanh);
TESSERA_NN_MODULE(HingeEmbeddingLoss);
TESSERA_NN_MODULE(HuberLoss);
TESSERA_NN_MODULE(Identity);
TESSERA_NN_MODULE(InstanceNorm1d);
TESSERA_NN_MODULE(InstanceNorm2d);
TESSERA_NN_MODULE(InstanceNorm3d);
TESSERA_NN_MODULE(KLDivLoss);
TESSERA_NN_MODULE(L1Loss);
TESSERA_NN_MODULE(LPPool1d);
TESSERA_NN_MODULE(LPPool2d);
TESSERA_NN_MODULE(LPPool3d);
TESSERA_NN_MODULE(LSTM);
TESSERA_NN_MODULE(LSTMCell);
TESSERA_NN_MODULE(LayerNorm);
TESSERA_NN_MODULE(LeakyReLU);
TESSERA_NN_MODULE(Linear);
TESSERA_NN_MODULE(LocalResponseNorm);
TESSERA_NN_MODULE(LogSigmoid);
TESSERA_NN_MODULE(LogSoftmax);
TESSERA_NN_MODULE(MSELoss);
TESSERA_NN_MODULE(MarginRankingLoss);
TESSERA_NN_MODULE(MaxPool1d);
TESSERA_NN_MODULE(MaxPool2d);
TESSERA_NN_MODULE(MaxPool3d);
TESSERA_NN_MODULE(MaxUnpool1d);
TESSERA_NN_MODULE(MaxUnpool2d);
TESSERA_NN_MODULE(MaxUnpool3d);
TESSERA_NN_MODULE(Mish);
TESSERA_NN_MODULE(MultiLabelMarginLoss);
TESSERA_NN_MODULE(MultiLabelSoftMarginLoss);
TESSERA_NN_MODULE(MultiMarginLoss);
TESSERA_NN_MODULE(MultiheadAttention);
TESSERA_NN_MODULE(NLLLoss);
TESSERA_NN_MODULE(PReLU);
TESSERA_NN_MODULE(PairwiseDistance);
TESSERA_NN_MODULE(PixelShuffle);
TESSERA_NN_MODULE(PixelUnshuffle);
TESSERA_NN_MODULE(PoissonNLLLoss);
TESSERA_NN_MODULE(RNN);
TESSERA_NN_MODULE(RNNCell);
TESSERA_NN_MODULE(RReLU);
TESSERA_NN_MODULE(ReLU);
TESSERA_NN_MODULE(ReLU6);
TESSERA_NN_MODULE(ReflectionPad1d);
TESSERA_NN_MODULE(ReflectionPad2d);
TESSERA_NN_MODULE(ReflectionPad3d);
TESSERA_NN_MODULE(ReplicationPad1d);
TESSERA_NN_MODULE(ReplicationPad2d);
TESSERA_NN_MODULE(ReplicationPad3d);
TESSERA_NN_MODULE(SELU);
TESSERA_NN_MODULE(SiLU);
TESSERA_NN_MODULE(Sigmoid);
TESSERA_NN_MODULE(SmoothL1Loss);
TESSERA_NN_MODULE(SoftMarginLoss);
TESSERA_NN_MODULE(Softmax);
TESSERA_NN_MODULE(Softmax2d);
TESSERA_NN_MODULE(Softmin);
TESSERA_NN_MODULE(Softplus);
TESSERA_NN_MODULE(Softshrink);
TESSERA_NN_MODULE(Softsign);
TESSERA_NN_MODULE(Tanh);
TESSERA_NN_MODULE(Tanhshrink);
TESSERA_NN_MODULE(Threshold);
TESSERA_NN_MODULE(Transformer);
TESSERA_NN_MODULE(TransformerDecoder);
TESSERA_NN_MODULE(TransformerDecoderLayer);
TESSERA_NN_MODULE(TransformerEncoder);
TESSERA_NN_MODULE(TransformerEncoderLayer);
TESSERA_NN_MODULE(TripletMarginLoss);
TESSERA_NN_MODULE(TripletMarginWithDistanceLoss);
TESSERA_NN_MODULE(Unflatten);
TESSERA_NN_MODULE(Unfold);
TESSERA_NN_MODULE(Upsample);
TESSERA_NN_MODULE(ZeroPad1d);
TESSERA_NN_MODULE(ZeroPad2d);
TESSERA_NN_MODULE(ZeroPad3d);
#undef TESSERA_NN_MODULE

// These have no forward, nor have ParameterList and ParameterDict: there is no call to hook.
using torch::nn::ModuleDict;
using torch::nn::ModuleList;

}  // namespace tessera::nn
