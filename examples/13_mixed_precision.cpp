// Mixed precision for a plain libtorch model, as Python's torch.amp: training in bf16, or in fp16
// with a scaler, and inference. What github.com/pytorch/pytorch/issues/44710 asks for:
//   13_mixed_precision
#include <tessera/autocast.h>
#include <tessera/optim.h>

#include <torch/torch.h>

#include <iomanip>
#include <iostream>

torch::nn::Sequential make_net(torch::Device device) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 16, 3).padding(1)),
                            torch::nn::BatchNorm2d(16), torch::nn::ReLU(), torch::nn::Flatten(),
                            torch::nn::Linear(16 * 8 * 8, 32), torch::nn::ReLU(),
                            torch::nn::Linear(32, 4));
  net->to(device);
  return net;
}

/// Trains, and returns the loss of the trained net; `dtype` is what it multiplies in.
double train(torch::Device device, torch::ScalarType dtype) {
  auto net = make_net(device);  // parameters and optimizer stay in fp32
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  const tessera::AutocastOptions mixed{.dtype = dtype, .enabled = dtype != torch::kFloat};
  tessera::optim::GradScaler scaler(
      {.device = device.type(), .enabled = dtype == torch::kHalf});  // bf16 needs none
  const auto images = torch::randn({64, 3, 8, 8}, device);
  const auto classes = images.mean({2, 3}).matmul(torch::randn({3, 4}, device)).argmax(1);
  for (int step = 0; step < 60; ++step) {
    torch::Tensor loss;
    {
      const tessera::Autocast autocast(device.type(), mixed);
      const auto output = net->forward(images);
      TORCH_CHECK(output.dtype() == dtype, "expected the net to compute in ", dtype);
      loss = torch::nn::functional::cross_entropy(output, classes);  // in fp32 by itself
    }
    optimizer.zero_grad();
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    scaler.step(optimizer);  // left out where a gradient is not finite
    scaler.update();
  }

  net->eval();  // inference: the same scope, weights are cast once
  const torch::NoGradGuard no_grad;
  const tessera::Autocast autocast(device.type(), mixed);
  return torch::nn::functional::cross_entropy(net->forward(images), classes).item<double>();
}

int main() try {
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  const double reference = train(device, torch::kFloat);
  std::cout << std::setprecision(3) << "loss in fp32 " << reference << std::endl;
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const double loss = train(device, dtype);
    std::cout << "loss in " << dtype << " " << loss << std::endl;
    TORCH_CHECK(std::abs(loss - reference) < 0.1, "expected nearly the loss of fp32, ", reference);
  }
  std::cout << "mixed precision trains alike" << std::endl;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
}
