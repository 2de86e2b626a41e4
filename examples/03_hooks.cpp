// Looks into a net while it trains: activations through forward hooks, gradients through
// post-accumulate hooks. The model says nothing of either.
//
//   03_hooks
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <map>

namespace tnn = tessera::nn;  // every torch::nn module, hookable

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    up = register_module("up", tnn::Linear(width, 4 * width));
    down = register_module("down", tnn::Linear(4 * width, width));
  }
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
  tnn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Block);  // instead of TORCH_MODULE(Block)

int main() try {
  torch::manual_seed(1);
  tnn::Sequential net({{"in", tnn::Linear(4, 16)},
                       {"block1", Block(16)},
                       {"block2", Block(16)},
                       {"out", tnn::Linear(16, 1)}});

  struct Activation {
    double mean = 0, deviation = 0;
  };
  std::map<std::string, Activation> activations;
  std::map<std::string, double> gradient_norms;
  std::vector<tessera::HookHandle> handles;
  for (const auto& item : net->named_modules("", /*include_self=*/false)) {
    handles.push_back(tessera::register_forward_hook(
        item.value(), [&, name = item.key()](auto& /*module*/, auto& /*args*/, auto& result) {
          const auto values = result.tensor().detach();
          activations[name] = {values.mean().template item<double>(),
                               values.std().template item<double>()};
        }));
  }
  for (const auto& item : net->named_parameters()) {
    handles.push_back(tessera::register_post_accumulate_grad_hook(
        item.value(), [&, name = item.key()](const torch::Tensor& parameter) {
          gradient_norms[name] = parameter.grad().norm().item<double>();
        }));
  }

  torch::optim::Adam optimizer(net->parameters(), 1e-2);
  double loss_value = 0;
  for (int step = 0; step <= 100; ++step) {
    const auto x = torch::randn({64, 4});
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(net(x), x.square().sum(1, /*keepdim=*/true));
    loss.backward();
    optimizer.step();
    loss_value = loss.item<double>();
    if (step % 50 != 0) continue;
    std::printf("step %d  loss %.3f\n", step, loss_value);
    for (const auto& [name, seen] : activations)
      std::printf("  %-12s output   mean %8.3f  deviation %7.3f\n", name.c_str(), seen.mean,
                  seen.deviation);
    for (const auto& [name, norm] : gradient_norms)
      std::printf("  %-20s gradient norm %8.3f\n", name.c_str(), norm);
  }

  for (auto& handle : handles) handle.remove();
  net(torch::randn({64, 4}));  // nothing is watched any more
  std::printf("watched %zu modules and %zu parameters, final loss %.3f\n", activations.size(),
              gradient_norms.size(), loss_value);
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
