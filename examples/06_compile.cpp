// A replicated train step as one program: forward, backward, averages in buckets and optimizer run
// without the code they were captured from:
//   tessera run -n 2 -- 06_compile
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <chrono>
#include <iostream>

namespace tnn = tessera::nn;
constexpr int64_t kWidth = 64, kBatch = 16;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(at::gelu(middle(at::gelu(first(x))))); }
  tnn::Linear first{register_module("first", tnn::Linear(8, kWidth))};
  tnn::Linear middle{register_module("middle", tnn::Linear(kWidth, kWidth))};
  tnn::Linear last{register_module("last", tnn::Linear(kWidth, 1))};
};
TESSERA_MODULE(Net);

int main() try {
  at::set_num_threads(1);
  tessera::init();
  torch::manual_seed(1);
  Net net;
  tessera::replicate(net);
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 3e-3, .fused = true});

  const auto step = [&](torch::Tensor x, torch::Tensor y) {  // written as ever, and runs as ever
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(net(x), y);
    loss.backward();
    optimizer.step();
    return loss;
  };
  auto compiled = tessera::compile(step, {.module = net, .optimizer = optimizer});

  torch::manual_seed(1 + tessera::rank());
  const auto train = [&](auto& one_step, int steps) {  // microseconds per step
    torch::Tensor loss;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) {
      const auto x = torch::randn({kBatch, 8});
      loss = one_step(x, x.sin().sum(1, /*keepdim=*/true));
    }
    const std::chrono::duration<double, std::micro> spent =
        std::chrono::steady_clock::now() - start;
    return std::pair(spent.count() / steps, loss.item<float>());
  };
  train(compiled, 4);  // captured, and from then on a program
  const auto [eager, loss_before] = train(step, 200);
  const auto [program, loss] = train(compiled, 800);
  if (tessera::rank() == 0) {
    std::cout << tessera::explain(compiled);
    const auto code = tessera::generated_code(compiled);  // yours to read
    std::cout << code.substr(code.find("program("), 400) << "  ...\n";
    std::cout << "a step takes " << eager << " us eagerly, " << program << " us as a program; loss "
              << loss_before << ", then " << loss << std::endl;
  }
  TORCH_CHECK(loss < 0.5, "expected to have learned something by now, got a loss of ", loss);
  tessera::shutdown();
  return 0;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
