#include "compiler/zoo.h"

#include <tessera/nn.h>

namespace tessera::testing {
namespace {

using torch::Tensor;
namespace tnn = tessera::nn;
namespace F = torch::nn::functional;

/// A model of the modules that `parts` are, and what it does with them.
template <class F, class... M>
ZooModel model(F forward, M... parts) {
  auto module = std::make_shared<torch::nn::Module>();
  int index = 0;
  (module->register_module("part" + std::to_string(index++), parts.ptr()), ...);
  return {module, [forward, parts...](const Tensor& x) mutable { return forward(parts..., x); }};
}

template <class M>
ZooModel plain(M part) {
  return {part.ptr(), [part](const Tensor& x) mutable { return part->forward(x); }};
}

template <class Activation>
ZooModel mlp(Activation activation) {
  return model(
      [activation](auto& up, auto& down, const Tensor& x) { return down(activation(up(x))); },
      tnn::Linear(6, 10), tnn::Linear(10, 4));
}

ZooModel conv(const torch::nn::Conv2dOptions& options) {
  return model([](auto& layer, auto& head,
                  const Tensor& x) { return head(torch::relu(layer(x)).mean({2, 3})); },
               tnn::Conv2d(options), tnn::Linear(options.out_channels(), 3));
}

/// A cell over time: [batch, time, features].
template <class Cell, class Step>
ZooModel unrolled(Cell cell, Step step) {
  return model([step](auto& own, auto& head, const Tensor& x) { return head(step(own, x)); }, cell,
               tnn::Linear(5, 2));
}

Tensor attend(const Tensor& qkv, bool causal) {  // [batch, tokens, 3 * width]
  const auto parts = qkv.unflatten(-1, {3, 2, -1}).permute({2, 0, 3, 1, 4});
  return at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, causal)
      .transpose(1, 2)
      .flatten(2);
}

ZooModel transformer(bool causal) {
  return model(
      [causal](auto& norm, auto& qkv, auto& out, auto& second, auto& up, auto& down,
               const Tensor& x) {
        const auto y = x + out(attend(qkv(norm(x)), causal));
        return y + down(torch::gelu(up(second(y))));
      },
      tnn::LayerNorm(torch::nn::LayerNormOptions({8})), tnn::Linear(8, 24), tnn::Linear(8, 8),
      tnn::LayerNorm(torch::nn::LayerNormOptions({8})), tnn::Linear(8, 16), tnn::Linear(16, 8));
}

const ZooEntry kZoo[] = {
    {"Linear", {6}, false, [] { return plain(tnn::Linear(6, 4)); }},
    {"LinearWithoutBias",
     {6},
     false,
     [] { return plain(tnn::Linear(torch::nn::LinearOptions(6, 4).bias(false))); }},
    {"MlpRelu", {6}, false, [] { return mlp([](const Tensor& x) { return torch::relu(x); }); }},
    {"MlpGelu", {6}, false, [] { return mlp([](const Tensor& x) { return torch::gelu(x); }); }},
    {"MlpTanh", {6}, false, [] { return mlp([](const Tensor& x) { return torch::tanh(x); }); }},
    {"MlpSilu", {6}, false, [] { return mlp([](const Tensor& x) { return torch::silu(x); }); }},
    {"MlpElu", {6}, false, [] { return mlp([](const Tensor& x) { return torch::elu(x); }); }},
    {"MlpSoftplus", {6}, false, [] { return mlp([](const Tensor& x) { return F::softplus(x); }); }},
    {"MlpInPlace",
     {6},
     false,
     [] {
       return mlp([](const Tensor& x) {
         auto y = x.clone();
         y.mul_(2).add_(1);
         y.select(1, 0).sub_(0.5);
         return y.sigmoid();
       });
     }},
    {"Dropout",
     {6},
     false,
     [] { return mlp([](const Tensor& x) { return torch::dropout(x, 0.3, true); }); }},
    {"LayerNorm",
     {6},
     false,
     [] {
       return model(
           [](auto& linear, auto& norm, const Tensor& x) { return norm(linear(x)).tanh(); },
           tnn::Linear(6, 8), tnn::LayerNorm(torch::nn::LayerNormOptions({8})));
     }},
    {"RmsNormByHand",
     {6},
     false,
     [] {
       return mlp([](const Tensor& x) {
         return x * (x.square().mean(-1, /*keepdim=*/true) + 1e-5).rsqrt();
       });
     }},
    {"BatchNorm",
     {6},
     false,
     [] {
       return model(
           [](auto& linear, auto& norm, const Tensor& x) { return norm(linear(x)).sigmoid(); },
           tnn::Linear(6, 8), tnn::BatchNorm1d(8));
     }},
    {"Residual",
     {6},
     false,
     [] {
       return model(
           [](auto& first, auto& second, const Tensor& x) {
             const auto y = x + torch::relu(first(x));
             return y + torch::relu(second(y));
           },
           tnn::Linear(6, 6), tnn::Linear(6, 6));
     }},
    {"UsedTwice",
     {6},
     false,
     [] {
       return model([](auto& layer, const Tensor& x) { return layer(torch::tanh(layer(x))); },
                    tnn::Linear(6, 6));
     }},
    {"TiedWeights",
     {3},
     true,
     [] {
       return model(
           [](auto& words, const Tensor& x) {
             return torch::log_softmax(words(x).matmul(words->weight.t()), -1);
           },
           tnn::Embedding(kZooWords, 5));
     }},
    {"EmbeddingMean",
     {4},
     true,
     [] {
       return model([](auto& words, auto& head, const Tensor& x) { return head(words(x).mean(1)); },
                    tnn::Embedding(kZooWords, 5), tnn::Linear(5, 3));
     }},
    {"CrossEntropy",
     {4},
     true,
     [] {
       return model(
           [](auto& words, auto& head, const Tensor& x) {
             return F::cross_entropy(head(words(x)).flatten(0, 1), x.flatten());
           },
           tnn::Embedding(kZooWords, 5), tnn::Linear(5, kZooWords));
     }},
    {"Conv2d", {3, 6, 6}, false, [] { return conv(torch::nn::Conv2dOptions(3, 4, 3)); }},
    {"Conv2dStridePadding",
     {3, 6, 6},
     false,
     [] { return conv(torch::nn::Conv2dOptions(3, 4, 3).stride(2).padding(1)); }},
    {"Conv2dDepthwise",
     {3, 6, 6},
     false,
     [] { return conv(torch::nn::Conv2dOptions(3, 6, 3).groups(3).bias(false)); }},
    {"Conv1d",
     {3, 9},
     false,
     [] {
       return model(
           [](auto& first, auto& second, const Tensor& x) { return second(first(x).relu()); },
           tnn::Conv1d(torch::nn::Conv1dOptions(3, 4, 3)),
           tnn::Conv1d(torch::nn::Conv1dOptions(4, 2, 3)));
     }},
    {"ConvTranspose",
     {3, 4, 4},
     false,
     [] {
       return plain(tnn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(3, 2, 3).stride(2)));
     }},
    {"ConvNet",
     {3, 8, 8},
     false,
     [] {
       return model(
           [](auto& layer, auto& norm, auto& head, const Tensor& x) {
             return head(torch::max_pool2d(norm(layer(x)).relu(), 2).flatten(1));
           },
           tnn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)), tnn::BatchNorm2d(4), tnn::Linear(36, 3));
     }},
    {"GroupNormAvgPool",
     {4, 6, 6},
     false,
     [] {
       return model(
           [](auto& layer, auto& norm, const Tensor& x) {
             return torch::avg_pool2d(torch::silu(norm(layer(x))), 2);
           },
           tnn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3)), tnn::GroupNorm(2, 4));
     }},
    {"RnnCell",
     {4, 3},
     false,
     [] {
       return unrolled(tnn::RNNCell(3, 5), [](auto& cell, const Tensor& x) {
         auto state = torch::zeros({x.size(0), 5}, x.options());
         for (int64_t i = 0; i < x.size(1); ++i) state = cell(x.select(1, i), state);
         return state;
       });
     }},
    {"GruCell",
     {4, 3},
     false,
     [] {
       return unrolled(tnn::GRUCell(3, 5), [](auto& cell, const Tensor& x) {
         auto state = torch::zeros({x.size(0), 5}, x.options());
         for (int64_t i = 0; i < x.size(1); ++i) state = cell(x.select(1, i), state);
         return state;
       });
     }},
    {"LstmCell",
     {4, 3},
     false,
     [] {
       return unrolled(tnn::LSTMCell(3, 5), [](auto& cell, const Tensor& x) {
         auto hidden = torch::zeros({x.size(0), 5}, x.options()),
              memory = torch::zeros({x.size(0), 5}, x.options());
         for (int64_t i = 0; i < x.size(1); ++i)
           std::tie(hidden, memory) = cell(x.select(1, i), std::tuple(hidden, memory));
         return hidden;
       });
     }},
    {"TransformerBlock", {5, 8}, false, [] { return transformer(/*causal=*/false); }},
    {"GptBlock", {5, 8}, false, [] { return transformer(/*causal=*/true); }},
    {"ChunksAndStacks",
     {8},
     false,
     [] {
       return model(
           [](auto& up, auto& down, const Tensor& x) {
             const auto parts = up(x).chunk(3, 1);
             const auto joined = torch::stack({parts[0] * parts[1], parts[2].neg()}, 1);
             return down(torch::cat({joined.select(1, 0), joined.select(1, 1)}, 1));
           },
           tnn::Linear(8, 12), tnn::Linear(8, 3));
     }},
    {"GatherAndIndex",
     {6},
     false,
     [] {
       return model(
           [](auto& linear, const Tensor& x) {
             const auto y = linear(x);
             const auto places = torch::arange(6, x.device()).flip(0).expand({x.size(0), 6});
             return y.gather(1, places) +
                    y.index_select(1, torch::tensor({1, 0, 2, 5, 4, 3}, x.device()));
           },
           tnn::Linear(6, 6));
     }},
    {"ScansAndExtremes",
     {6},
     false,
     [] {
       return model(
           [](auto& linear, const Tensor& x) {
             const auto y = linear(x);
             return y.cumsum(1) + y.amax(1, /*keepdim=*/true) - y.logsumexp(1, /*keepdim=*/true);
           },
           tnn::Linear(6, 6));
     }},
    {"Einsum",
     {4, 6},
     false,
     [] {
       return model(
           [](auto& linear, const Tensor& x) {
             const auto y = linear(x);
             return torch::einsum("bij,bkj->bik", {y, x}).softmax(-1);
           },
           tnn::Linear(6, 6));
     }},
};

}  // namespace

const std::vector<ZooEntry>& zoo() {
  static const std::vector<ZooEntry> entries(std::begin(kZoo), std::end(kZoo));
  return entries;
}

}  // namespace tessera::testing
