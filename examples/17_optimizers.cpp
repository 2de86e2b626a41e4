// Muon for the matrices of hidden layers, AdamW with 8-bit state for the rest, a schedule, and an
// average of the weights for evaluation.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <iostream>

namespace optim = tessera::optim;

int main() {
  tessera::init();
  torch::manual_seed(1);
  tessera::nn::Linear in(16, 256), hidden(256, 256), out(256, 1);
  tessera::nn::Sequential net(in, tessera::nn::Tanh(), hidden, tessera::nn::Tanh(), out);
  tessera::fully_shard(net);

  optim::Muon muon({hidden->weight}, {.lr = 0.02});
  optim::AdamW adamw({in->weight, in->bias, hidden->bias, out->weight, out->bias},
                     {.lr = 3e-3, .state_dtype = torch::kByte});
  const optim::WarmupStableDecayLROptions plan{
      .num_warmup_steps = 20, .num_decay_steps = 60, .num_training_steps = 300};
  optim::WarmupStableDecayLR muon_schedule(muon, plan), adamw_schedule(adamw, plan);
  optim::ExponentialMovingAverage average(net, {.decay = 0.97});

  const auto loss_of = [&](const torch::Tensor& x) {
    return torch::mse_loss(net->forward(x), x.sin().sum(1, /*keepdim=*/true));
  };
  for (int step = 0; step < plan.num_training_steps; ++step) {
    net->zero_grad();
    const auto loss = loss_of(torch::randn({64, 16}));
    loss.backward();
    muon.step();
    adamw.step();
    muon_schedule.step();
    adamw_schedule.step();
    average.update();
    if (tessera::rank() == 0 && step % 100 == 99)
      std::cout << "loss " << loss.item<float>() << ", lr " << muon_schedule.last_lr()[0] << "\n";
  }

  tessera::save("checkpoints/muon", net, muon);  // a folder for each optimizer
  tessera::save("checkpoints/adamw", net, adamw);
  tessera::save("checkpoints/average", average.module());
  {
    const optim::AveragedWeights averaged(average);  // until the end of this block
    const torch::NoGradGuard no_grad;
    const auto loss = loss_of(torch::randn({512, 16}));
    if (tessera::rank() == 0) std::cout << "averaged weights: loss " << loss.item<float>() << "\n";
  }
  tessera::shutdown();
}
