// A convolutional net learns to tell stripes: a training program in one file, as one begins with
// libtorch. It knows nothing of Tessera.
#include <torch/torch.h>

#include <cstdio>

constexpr int64_t kImages = 64;
constexpr int64_t kBatch = 16;

/// Horizontal stripes are of class 0, vertical ones of class 1.
class Stripes : public torch::data::datasets::Dataset<Stripes> {
 public:
  torch::data::Example<> get(size_t index) override {
    const auto target = static_cast<int64_t>(index % 2);
    auto image = torch::zeros({1, 28, 28});
    image.slice(target + 1, 0, 28, 2).fill_(1);
    return {image, torch::tensor(target)};
  }
  std::optional<size_t> size() const override { return kImages; }
};

struct Net : torch::nn::Module {
  Net()
      : conv1(torch::nn::Conv2dOptions(1, 10, /*kernel_size=*/5)),
        conv2(torch::nn::Conv2dOptions(10, 20, /*kernel_size=*/5)),
        fc1(320, 50),
        fc2(50, 2) {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("conv2_drop", conv2_drop);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(torch::max_pool2d(conv1->forward(x), 2));
    x = torch::relu(torch::max_pool2d(conv2_drop->forward(conv2->forward(x)), 2));
    x = x.view({-1, 320});
    x = torch::relu(fc1->forward(x));
    x = torch::nn::functional::dropout(
        x, torch::nn::functional::DropoutFuncOptions().p(0.1).training(is_training()));
    return torch::log_softmax(fc2->forward(x), /*dim=*/1);
  }

  torch::nn::Conv2d conv1;
  torch::nn::Conv2d conv2;
  torch::nn::Dropout2d conv2_drop;
  torch::nn::Linear fc1;
  torch::nn::Linear fc2;
};

template <typename DataLoader>
float train(Net& model, DataLoader& loader, torch::optim::Optimizer& optimizer) {
  model.train();
  float last = 0;
  for (auto& batch : loader) {
    optimizer.zero_grad();
    auto output = model.forward(batch.data);
    auto loss = torch::nll_loss(output, batch.target);
    loss.backward();
    optimizer.step();
    last = loss.template item<float>();
  }
  return last;
}

int main() {
  torch::manual_seed(1);
  Net model;
  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Stripes().map(torch::data::transforms::Stack<>()), kBatch);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.5));
  float loss = 0;
  for (int epoch = 0; epoch < 4; ++epoch) loss = train(model, *loader, optimizer);
  std::printf("torch::nn::Linear was trained to a loss of %.3f\n", loss);
  return loss < 0.5F ? 0 : 1;
}
