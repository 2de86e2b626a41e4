#include <tessera/tessera.h>

#include "checks.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iomanip>
#include <sstream>

namespace multi_gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kHiddenShare = 0.5;
constexpr double kNegligible = 0.05;  // of a step: then there is nothing to hide

struct Size {
  int64_t width;
  int64_t layers;
  int64_t rows;
};

tessera::nn::Sequential make_net(const Size& size, c10::Device device) {
  torch::manual_seed(1);
  tessera::nn::Sequential net;
  for (int64_t i = 0; i < size.layers; ++i) {
    net->push_back(tessera::nn::Linear(size.width, size.width));
    net->push_back(tessera::nn::ReLU());
  }
  net->to(device);
  return net;
}

double seconds_of(const std::function<void()>& run, c10::Device device) {
  synchronize(device);
  tessera::barrier();
  const auto start = Clock::now();
  run();
  synchronize(device);
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Sums the buffer in messages of the size that replicate's buckets have.
void reduce_alone(const at::Tensor& buffer) {
  constexpr int64_t kBucket = int64_t{25 << 20} / static_cast<int64_t>(sizeof(float));
  const auto backend = tessera::default_group()->getBackend(buffer.device().type());
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (const auto& part : buffer.split(kBucket)) {
    std::vector<at::Tensor> tensors = {part};
    works.push_back(backend->allreduce(tensors));
  }
  for (const auto& work : works) work->wait();
}

}  // namespace

Outcome check_overlap(const Setting& setting) {
  const bool is_short = setting.shares_device || setting.device.is_cpu();
  const Size size = is_short ? Size{.width = 256, .layers = 4, .rows = 64}
                             : Size{.width = 2048, .layers = 12, .rows = 4096};
  const auto x = at::randn({size.rows, size.width}, at::TensorOptions(setting.device));
  auto plain = make_net(size, setting.device);
  auto replicated = tessera::replicate(make_net(size, setting.device));
  int64_t elements = 0;
  for (const auto& parameter : plain->parameters()) elements += parameter.numel();
  const auto buffer = at::zeros({elements}, at::TensorOptions(setting.device));

  const auto step = [&](tessera::nn::Sequential& net) {
    net->zero_grad();
    net(x).square().mean().backward();
  };
  std::vector<double> together;
  std::vector<double> computing;
  std::vector<double> talking;
  constexpr int kWarmUp = 3;
  for (int i = 0; i < kWarmUp + 9; ++i) {  // interleaved, so that a busy moment hits all alike
    const double both = seconds_of([&] { step(replicated); }, setting.device);
    const double compute = seconds_of([&] { step(plain); }, setting.device);
    const double talk = seconds_of([&] { reduce_alone(buffer); }, setting.device);
    if (i < kWarmUp) continue;
    together.push_back(both);
    computing.push_back(compute);
    talking.push_back(talk);
  }
  const double both = median(together);
  const double compute = median(computing);
  const double talk = median(talking);
  // No more can be hidden than backward has time for.
  const double hidden = std::clamp((compute + talk - both) / std::min(compute, talk), 0.0, 1.0);
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << "forward and backward " << both * 1e3
       << " ms replicated, " << compute * 1e3 << " ms without communication, " << talk * 1e3
       << " ms of communication alone: " << 100 * hidden << " % of what can be is hidden";
  if (is_short) {
    text << "\n       ranks share a device: not judged";
    return {true, text.str()};
  }
  text << ", expected at least " << 100 * kHiddenShare << " %";
  return {hidden >= kHiddenShare || talk <= kNegligible * compute, text.str()};
}

}  // namespace multi_gpu
