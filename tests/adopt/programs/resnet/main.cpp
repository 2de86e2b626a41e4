#include "resnet.h"

#include <cstdio>

int main() {
  torch::manual_seed(1);
  ResNet net(std::vector<int64_t>{8, 8, 16});
  torch::optim::SGD optimizer(net->parameters(), /*lr=*/0.05);
  const auto x = torch::randn({8, 3, 8, 8});
  const auto target = torch::randint(10, {8});
  float first = 0;
  float last = 0;
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    const auto loss = nn::CrossEntropyLoss()(net(x), target);
    loss.backward();
    optimizer.step();
    last = loss.item<float>();
    if (step == 0) first = last;
  }
  std::printf("loss %.3f, then %.3f; the last block has stride %d\n", first, last,
              static_cast<int>(net->stride_of(2)));
  return last < first && net->stride_of(2) == 2 ? 0 : 1;
}
