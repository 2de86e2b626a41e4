// A generator and a discriminator against each other, with the names of libtorch opened.
#include <torch/torch.h>

#include <cstdio>

using namespace torch;

constexpr int64_t kNoiseSize = 16;
constexpr int64_t kBatchSize = 4;

struct DCGANGeneratorImpl : nn::Module {
  explicit DCGANGeneratorImpl(int noise_size)
      : conv1(nn::ConvTranspose2dOptions(noise_size, 32, 4).bias(false)),
        batch_norm1(32),
        conv2(nn::ConvTranspose2dOptions(32, 16, 3).stride(2).padding(1).bias(false)),
        batch_norm2(16),
        conv3(nn::ConvTranspose2dOptions(16, 1, 4).stride(2).padding(1).bias(false)) {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("conv3", conv3);
    register_module("batch_norm1", batch_norm1);
    register_module("batch_norm2", batch_norm2);
  }

  Tensor forward(Tensor x) {
    x = torch::relu(batch_norm1(conv1(x)));
    x = torch::relu(batch_norm2(conv2(x)));
    return torch::tanh(conv3(x));
  }

  nn::ConvTranspose2d conv1;
  nn::BatchNorm2d batch_norm1;
  nn::ConvTranspose2d conv2;
  nn::BatchNorm2d batch_norm2;
  nn::ConvTranspose2d conv3;
};
TORCH_MODULE(DCGANGenerator);

inline nn::Sequential make_discriminator() {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 4).stride(2).padding(1).bias(false)),
                        nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)),
                        nn::Conv2d(nn::Conv2dOptions(16, 32, 4).stride(2).padding(1).bias(false)),
                        nn::BatchNorm2d(32),
                        nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)),
                        nn::Conv2d(nn::Conv2dOptions(32, 1, 3).stride(1).padding(0).bias(false)),
                        nn::Flatten(), nn::Sigmoid());
}

/// Weights as the paper has them. Returns how many layers it found.
inline int initialize(nn::Module& model) {
  int layers = 0;
  model.apply([&](nn::Module& module) {
    NoGradGuard no_grad;
    if (auto* up = module.as<nn::ConvTranspose2d>()) {
      nn::init::normal_(up->weight, 0.0, 0.02);
    } else if (auto* down = module.as<nn::Conv2d>()) {
      nn::init::normal_(down->weight, 0.0, 0.02);
    } else if (auto* norm = module.as<nn::BatchNorm2d>()) {
      nn::init::normal_(norm->weight, 1.0, 0.02);
    } else {
      return;
    }
    ++layers;
  });
  return layers;
}

int main() {
  torch::manual_seed(1);
  DCGANGenerator generator(kNoiseSize);
  nn::Sequential discriminator = make_discriminator();
  const int layers = initialize(*generator) + initialize(*discriminator);
  optim::Adam generator_optimizer(generator->parameters(), optim::AdamOptions(2e-4));
  optim::Adam discriminator_optimizer(discriminator->parameters(), optim::AdamOptions(2e-4));
  const auto first_before = discriminator->at<nn::Conv2dImpl>(0).weight.clone();
  for (int batch = 0; batch < 3; ++batch) {
    discriminator->zero_grad();
    const auto real = discriminator->forward(torch::rand({kBatchSize, 1, 14, 14}));
    const auto fakes = generator->forward(torch::randn({kBatchSize, kNoiseSize, 1, 1}));
    const auto fake = discriminator->forward(fakes.detach());
    const auto d_loss = torch::binary_cross_entropy(real, torch::ones_like(real)) +
                        torch::binary_cross_entropy(fake, torch::zeros_like(fake));
    d_loss.backward();
    discriminator_optimizer.step();

    generator->zero_grad();
    const auto judged = discriminator->forward(fakes);
    torch::binary_cross_entropy(judged, torch::ones_like(judged)).backward();
    generator_optimizer.step();
  }
  const auto& first = discriminator->at<nn::Conv2dImpl>(0);
  const bool has_learned = !first.weight.equal(first_before);
  std::printf("initialized %d layers\n", layers);
  return layers == 9 && has_learned ? 0 : 1;
}
