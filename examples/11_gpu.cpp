// A step in mixed precision that never waits for the GPU, unless it prints. Without one it runs on
// the CPU:
//   tessera run -n 2 -- 11_gpu [bf16|fp16]
#include <tessera/tessera.h>

#include <ATen/Context.h>
#include <torch/torch.h>

#include <iostream>

namespace nn = tessera::nn;
constexpr int64_t kWidth = 64, kHeads = 4, kTokens = 32, kBatch = 8, kWords = 100;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) {  // [batch, tokens]
    const auto x = words(tokens);
    const auto parts = qkv(x).unflatten(-1, {3, kHeads, -1}).unbind(2);  // q, k, v
    const auto mixed = at::scaled_dot_product_attention(
        parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2), {}, 0, true);
    return head(x + out(mixed.transpose(1, 2).flatten(2)));
  }
  nn::Embedding words{register_module("words", nn::Embedding(kWords, kWidth))};
  nn::Linear qkv{register_module("qkv", nn::Linear(kWidth, 3 * kWidth))};
  nn::Linear out{register_module("out", nn::Linear(kWidth, kWidth))};
  nn::Linear head{register_module("head", nn::Linear(kWidth, kWords))};
};
TESSERA_MODULE(Net);

/// cuDNN's attention before flash attention, which is slower on some GPUs.
void prefer_cudnn_attention() {
  using at::SDPBackend;
  std::vector<int64_t> order;
  for (const auto backend :
       {SDPBackend::cudnn_attention, SDPBackend::flash_attention, SDPBackend::efficient_attention,
        SDPBackend::math, SDPBackend::overrideable})
    order.push_back(static_cast<int64_t>(backend));
  at::globalContext().setSDPPriorityOrder(order);
}

int main(int argc, char** argv) try {
  const bool is_fp16 = argc > 1 && std::string(argv[1]) == "fp16";
  tessera::init();  // makes this rank's GPU the current one
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  prefer_cudnn_attention();

  torch::manual_seed(1);
  Net net;
  net->to(device);
  tessera::replicate(net);
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 3e-3, .fused = true});
  tessera::optim::GradScaler scaler({.device = device.type(), .enabled = is_fp16});

  torch::manual_seed(1 + tessera::rank());
  auto sum = torch::zeros({}, device);  // of losses since the last line, on the device
  for (int step = 1; step <= 60; ++step) {
    const auto tokens = torch::randint(kWords, {kBatch, kTokens}, device).to(torch::kLong);
    at::Tensor loss;
    {
      const tessera::Autocast autocast(device.type(),
                                       {.dtype = is_fp16 ? torch::kHalf : torch::kBFloat16});
      const auto logits = net(tokens).flatten(0, 1);
      loss = torch::nn::functional::cross_entropy(logits, (7 * tokens + 3).flatten() % kWords);
    }
    optimizer.zero_grad();
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    tessera::optim::clip_grad_norm_(net->parameters(), 1.0);
    scaler.step(optimizer);  // left out where a gradient is not finite
    scaler.update();
    sum += loss.detach();
    if (step % 20 == 0) {  // here alone the host waits
      const auto mean = tessera::all_reduce(sum, tessera::ReduceOp::AVG).item<float>() / 20;
      if (tessera::rank() == 0) std::cout << "step " << step << "  loss " << mean << std::endl;
      TORCH_CHECK(step < 60 || mean < 4, "expected to have learned something by now");
      sum.zero_();
    }
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
