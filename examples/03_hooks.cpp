// Looks into a net while it trains, through the hooks that Python's modules have: before and after
// forward, and in backward. The model says nothing of them. What
// github.com/pytorch/pytorch/issues/25888 asks for:
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

struct Seen {  // of a module, in its last call
  double mean = 0, deviation = 0, gradient = 0;
};

int main() try {
  torch::manual_seed(1);
  tnn::Sequential net({{"in", tnn::Linear(4, 16)},
                       {"block1", Block(16)},
                       {"block2", Block(16)},
                       {"out", tnn::Linear(16, 1)}});

  std::map<std::string, Seen> seen;
  std::vector<tessera::HookHandle> handles;
  handles.push_back(tessera::register_forward_pre_hook(net, [](auto& /*module*/, auto& arguments) {
    arguments.tensor(0) = arguments.tensor(0).clamp(-2, 2);  // arguments may be replaced
  }));
  for (const auto& item : net->named_modules("", /*include_self=*/false)) {
    handles.push_back(tessera::register_forward_hook(
        item.value(), [&, name = item.key()](auto& /*module*/, auto& /*arguments*/, auto& result) {
          const auto values = result.tensor().detach();  // results as well
          seen[name].mean = values.mean().template item<double>();
          seen[name].deviation = values.std().template item<double>();
        }));
    handles.push_back(tessera::register_full_backward_hook(
        item.value(),
        [&, name = item.key()](auto& /*module*/, auto& /*of_inputs*/, const auto& of_outputs) {
          seen[name].gradient = of_outputs[0].norm().template item<double>();
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
    for (const auto& [name, of] : seen)
      std::printf("  %-12s output: mean %6.3f, deviation %6.3f, norm of its gradient %6.3f\n",
                  name.c_str(), of.mean, of.deviation, of.gradient);
  }

  for (auto& handle : handles) handle.remove();
  net(torch::randn({64, 4}));  // nothing is watched any more
  std::printf("watched %zu modules, final loss %.3f\n", seen.size(), loss_value);
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
}
