// A small GPT learns to write like this repository's README, on as many ranks as you like:
//   tessera run -n 2 -- 01_replicate [text file]
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <iterator>

namespace tnn = tessera::nn;
namespace F = torch::nn::functional;
constexpr int64_t kWidth = 128, kHeads = 4, kContext = 64, kLayers = 2, kBatch = 8, kBytes = 256;

struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {  // [batch, tokens, width]
    auto qkv = qkv_(norm1_(x)).view({x.size(0), x.size(1), 3, kHeads, -1}).permute({2, 0, 3, 1, 4});
    auto mixed =
        at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0, /*is_causal=*/true);
    auto y = x + out_(mixed.transpose(1, 2).reshape(x.sizes()));
    return y + down_(at::gelu(up_(norm2_(y))));
  }
  tnn::LayerNorm norm1_{
      register_module("norm1", tnn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  tnn::Linear qkv_{register_module("qkv", tnn::Linear(kWidth, 3 * kWidth))};
  tnn::Linear out_{register_module("out", tnn::Linear(kWidth, kWidth))};
  tnn::LayerNorm norm2_{
      register_module("norm2", tnn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  tnn::Linear up_{register_module("up", tnn::Linear(kWidth, 4 * kWidth))};
  tnn::Linear down_{register_module("down", tnn::Linear(4 * kWidth, kWidth))};
};
TESSERA_MODULE(Block);

struct GptImpl : torch::nn::Module {
  GptImpl() {
    for (int64_t i = 0; i < kLayers; ++i) blocks_->push_back(Block());
  }
  at::Tensor forward(const at::Tensor& tokens) {  // [batch, tokens]
    auto x = words_(tokens) + places_(at::arange(tokens.size(1)));
    return head_(norm_(blocks_(x)));
  }
  tnn::Embedding words_{register_module("words", tnn::Embedding(kBytes, kWidth))};
  tnn::Embedding places_{register_module("places", tnn::Embedding(kContext, kWidth))};
  tnn::Sequential blocks_{register_module("blocks", tnn::Sequential())};
  tnn::LayerNorm norm_{
      register_module("norm", tnn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  tnn::Linear head_{register_module("head", tnn::Linear(kWidth, kBytes))};
};
TESSERA_MODULE(Gpt);

int main(int argc, char** argv) try {
  at::set_num_threads(1);
  tessera::init();
  std::ifstream file(argc > 1 ? argv[1] : "README.md");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  TORCH_CHECK(text.size() > kContext + 1, "expected a text to learn from: 01_replicate FILE");
  const auto bytes =
      at::tensor(at::ArrayRef<uint8_t>(reinterpret_cast<const uint8_t*>(text.data()), text.size()))
          .to(torch::kLong);

  Gpt net;
  tessera::replicate(net);  // the only line that knows of other ranks
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 2e-3});
  torch::manual_seed(1 + tessera::rank());  // every rank reads elsewhere
  for (int step = 1; step <= 100; ++step) {
    const auto starts = at::randint(bytes.size(0) - kContext - 1, {kBatch, 1}, torch::kLong);
    const auto window = bytes.index({starts + at::arange(kContext + 1)});
    const auto logits = net(window.slice(1, 0, kContext));
    const auto loss = F::cross_entropy(logits.flatten(0, 1), window.slice(1, 1).flatten());
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    const auto mean = tessera::all_reduce(loss.detach(), tessera::ReduceOp::AVG).item<float>();
    if (tessera::rank() == 0 && step % 10 == 0)
      std::cout << "step " << step << "  loss " << mean << "  (guessing: 5.55)" << std::endl;
    TORCH_CHECK(step < 100 || mean < 4, "expected to have learned something by now");
  }
  tessera::shutdown();
  return 0;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
