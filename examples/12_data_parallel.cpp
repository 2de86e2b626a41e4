// A libtorch model that knows nothing of ranks, trained on many: plain modules, libtorch's own
// DataLoader and optimizer. What github.com/pytorch/pytorch/issues/48959 asks for, with the net of
// the example that it refers to, which calls MPI_Allreduce for each parameter:
//   tessera run -n 2 -- 12_data_parallel
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cmath>
#include <iostream>

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {  // [batch, 1, 28, 28]
    x = torch::relu(torch::max_pool2d(conv1(x), 2));
    x = torch::relu(torch::max_pool2d(drop(conv2(x)), 2));
    return torch::log_softmax(fc2(torch::relu(fc1(x.flatten(1)))), 1);
  }
  torch::nn::Conv2d conv1{register_module("conv1", torch::nn::Conv2d(1, 10, 5))};
  torch::nn::Conv2d conv2{register_module("conv2", torch::nn::Conv2d(10, 20, 5))};
  torch::nn::Dropout2d drop{register_module("drop", torch::nn::Dropout2d(0.1))};
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(320, 50))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(50, 10))};
};
TORCH_MODULE(Net);

/// In place of a download: digit k is a noisy bar at the k-th angle.
struct Digits : torch::data::datasets::Dataset<Digits> {
  torch::data::Example<> get(size_t index) override {
    const auto digit = static_cast<int64_t>(index % 10);
    const auto places = torch::linspace(-1, 1, 28);
    const double angle = M_PI * static_cast<double>(digit) / 10;
    const auto distance = places.unsqueeze(1) * std::cos(angle) + places * std::sin(angle);
    const auto image = torch::exp(-30 * distance.square()) + 0.3 * torch::randn({28, 28});
    return {image.unsqueeze(0), torch::tensor(digit)};
  }
  torch::optional<size_t> size() const override { return 4000; }
};

int main() try {
  at::set_num_threads(1);
  tessera::init();  // ranks from tessera run, torchrun, Slurm or MPI
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  Net net;
  net->to(device);
  tessera::replicate(net);  // rank 0's parameters for all; gradients averaged during backward
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(2e-3));

  torch::manual_seed(1 + tessera::rank());
  const auto data = Digits().map(torch::data::transforms::Stack<>());
  torch::data::samplers::DistributedRandomSampler sampler(*Digits().size(), tessera::world_size(),
                                                          tessera::rank());
  double accuracy = 0;
  for (size_t epoch = 1; epoch <= 3; ++epoch) {
    sampler.set_epoch(epoch);  // other samples for this rank than in the last one
    auto hits = torch::zeros({2}, device);
    const auto loader = torch::data::make_data_loader(data, sampler, /*batch_size=*/20);
    for (const auto& batch : *loader) {
      const auto target = batch.target.to(device);
      const auto output = net(batch.data.to(device));
      optimizer.zero_grad();
      torch::nll_loss(output, target).backward();
      optimizer.step();
      hits +=
          torch::stack({output.argmax(1).eq(target).sum(), torch::tensor(target.numel(), device)});
    }
    hits = tessera::all_reduce(hits);
    accuracy = (hits[0] / hits[1]).item<double>();
    if (tessera::rank() == 0)
      std::cout << "epoch " << epoch << "  accuracy over " << tessera::world_size()
                << " ranks: " << accuracy << std::endl;
  }
  TORCH_CHECK(accuracy > 0.9, "expected to have learned the digits by now");
  if (tessera::rank() == 0) torch::save(net, "net.pt");  // as ever: replicate renames nothing
  tessera::shutdown();
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
}
