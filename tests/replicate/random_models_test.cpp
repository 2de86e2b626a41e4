// Models drawn by seed, trained by ranks together and by one process on the joined batch.
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "support/random.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

namespace tessera::testing {
namespace {

/// Layers of random widths; some shared, some with a branch that only some steps use.
struct DrawnImpl : torch::nn::Module {
  explicit DrawnImpl(uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto draw = [&](uint64_t below) { return static_cast<int64_t>(random() % below); };
    int64_t width = kWidth;
    const auto depth = 1 + draw(5);
    for (int64_t i = 0; i < depth; ++i) {
      const bool shares = !layers.empty() && layers.back()->options.in_features() == width &&
                          layers.back()->options.out_features() == width && draw(2) == 0;
      if (shares) {
        layers.push_back(layers.back());
      } else {
        const int64_t next = draw(3) == 0 ? width : 1 + draw(300);
        layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(width, next)));
        width = next;
      }
      const bool has_branch = draw(3) == 0;
      branches.push_back(
          has_branch ? register_module("branch" + std::to_string(i), nn::Linear(width, width))
                     : nn::Linear(nullptr));
    }
    head = register_module("head", nn::Linear(width, kWidth));
  }
  at::Tensor forward(at::Tensor x, bool takes_branches) {
    for (size_t i = 0; i < layers.size(); ++i) {
      x = layers[i](x).tanh();
      if (takes_branches && branches[i]) x = x + branches[i](x);
    }
    return head(x);
  }
  static constexpr int64_t kWidth = 6;
  std::vector<nn::Linear> layers, branches;
  nn::Linear head{nullptr};
};
TESSERA_MODULE(Drawn);

void train_one(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto flip = [&] { return random() % 2 == 0; };
  const ReplicateOptions options{
      .bucket_cap_mb = flip() ? std::optional<double>(0.002) : std::nullopt,
      .find_unused_parameters = true,
      .gradient_as_bucket_view = flip(),
      .overlap = flip()};
  auto [reference, parallel] = twins<Drawn>(seed, seed);
  replicate(parallel, options);
  torch::optim::SGD reference_optimizer(reference->parameters(), 0.05);
  torch::optim::SGD parallel_optimizer(parallel->parameters(), 0.05);
  const int64_t rows = 2;
  for (uint64_t step = 0; step < 4; ++step) {
    auto generator = at::detail::createCPUGenerator(seed * 31 + step);
    const auto batch = at::randn({world_size() * rows, DrawnImpl::kWidth}, generator);
    const bool takes_branches = (seed + step) % 2 == 0;
    reference_optimizer.zero_grad();
    parallel_optimizer.zero_grad();
    reference(batch, takes_branches).pow(2).mean().backward();
    parallel(batch.narrow(0, rank() * rows, rows), takes_branches).pow(2).mean().backward();
    reference_optimizer.step();
    parallel_optimizer.step();
  }
  const auto expected = reference->named_parameters();
  for (const auto& item : parallel->named_parameters()) {
    EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 1e-4, 1e-5))
        << item.key() << " with seed " << seed;
  }
}

class RandomModels : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OnThreads, RandomModels, ::testing::Values(2, 3, 4),
                         ::testing::PrintToStringParamName());

TEST_P(RandomModels, TrainLikeOneProcessOnTheJoinedBatch) {
  const auto first = test_seed();
  for (uint64_t i = 0; i < 15; ++i)
    run_threads(GetParam(), [seed = first + i] { train_one(seed); });
}

}  // namespace
}  // namespace tessera::testing
