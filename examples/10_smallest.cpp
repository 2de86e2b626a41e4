// Data parallel training in one line, on the GPUs that the machine has, or on its cores:
//   tessera run -n 2 -- 10_smallest
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <iostream>

int main() {
  tessera::init();  // ranks from tessera run, torchrun, Slurm, MPI; each has its GPU, if there are
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  tessera::nn::Sequential net(tessera::nn::Linear(8, 64), tessera::nn::ReLU(),
                              tessera::nn::Linear(64, 1));
  net->to(device);
  tessera::replicate(net);  // averages gradients over the ranks during backward
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 1e-2, .fused = true});
  torch::manual_seed(tessera::rank());  // every rank has batches of its own
  for (int step = 1; step <= 200; ++step) {
    const auto x = torch::randn({64, 8}, device);
    const auto loss = torch::mse_loss(net(x), x.sum(1, /*keepdim=*/true));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (tessera::rank() == 0 && step % 50 == 0) std::cout << "loss " << loss.item<float>() << "\n";
  }
  tessera::shutdown();
}
