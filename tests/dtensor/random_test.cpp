// Draws on all ranks are the one-device draw of the same seed.
#include "compose/on_device.h"
#include "dtensor/placed.h"

namespace tessera::testing {
namespace {

const std::vector<Placement> kPlacements = {Replicate(), Shard(0), Shard(1)};

/// Compares what a draw gives for every placement with one device, and that both leave the
/// generator in the same state.
void expect_same_draw(const DeviceMesh& mesh, const std::string& what,
                      const std::function<at::Tensor()>& plain,
                      const std::function<at::Tensor(const Placements&)>& distributed) {
  for (const auto& placements : combinations(kPlacements, static_cast<size_t>(mesh.ndim()))) {
    const auto label = c10::str(what, " ", placements);
    torch::manual_seed(7);
    const auto expected = plain();
    const auto next = torch::rand({3}, run_device());
    torch::manual_seed(7);
    const auto actual = distributed(placements);
    expect_bitwise_equal(full_of(actual), expected, label);
    expect_bitwise_equal(torch::rand({3}, run_device()), next, label + ", what is drawn next");
  }
}

void expect_one_device_draws(const DeviceMesh& mesh) {
  const auto whole = numbered({5, 7}, run_device());
  expect_same_draw(
      mesh, "randn", [] { return torch::randn({5, 7}, run_device()); },
      [&](const Placements& to) { return dtensor::randn({5, 7}, mesh, to); });
  expect_same_draw(
      mesh, "rand", [] { return torch::rand({5, 7}, run_device()); },
      [&](const Placements& to) { return dtensor::rand({5, 7}, mesh, to); });
  expect_same_draw(
      mesh, "dropout", [&] { return torch::dropout(whole, 0.4, true); },
      [&](const Placements& to) { return torch::dropout(placed(whole, mesh, to), 0.4, true); });
  // Kernels of a GPU deal numbers out by dtype and memory order.
  expect_same_draw(
      mesh, "dropout of bfloat16",
      [&] { return torch::dropout(whole.to(at::kBFloat16), 0.3, true); },
      [&](const Placements& to) {
        return torch::dropout(placed(whole.to(at::kBFloat16), mesh, to), 0.3, true);
      });
  expect_same_draw(
      mesh, "dropout of a transposed tensor", [&] { return torch::dropout(whole.t(), 0.4, true); },
      [&](const Placements& to) { return torch::dropout(placed(whole, mesh, to).t(), 0.4, true); });
  expect_same_draw(
      mesh, "dropout of nothing", [&] { return std::get<0>(at::native_dropout(whole, 0, true)); },
      [&](const Placements& to) {
        return std::get<0>(at::native_dropout(placed(whole, mesh, to), 0, true));
      });
  expect_same_draw(
      mesh, "bernoulli", [&] { return torch::bernoulli(torch::sigmoid(whole)); },
      [&](const Placements& to) {
        return torch::bernoulli(torch::sigmoid(placed(whole, mesh, to)));
      });
  expect_same_draw(
      mesh, "rand_like", [&] { return torch::rand_like(whole); },
      [&](const Placements& to) { return torch::rand_like(placed(whole, mesh, to)); });
  const auto row_major = at::TensorOptions().memory_format(at::MemoryFormat::Contiguous);
  expect_same_draw(
      mesh, "rand_like of a transposed tensor in contiguous order",
      [&] { return torch::rand_like(whole.t(), row_major); },
      [&](const Placements& to) {
        return torch::rand_like(placed(whole, mesh, to).t(), row_major);
      });
  expect_same_draw(
      mesh, "kaiming_uniform_",
      [] { return torch::nn::init::kaiming_uniform_(torch::empty({5, 7}, run_device())); },
      [&](const Placements& to) {
        return torch::nn::init::kaiming_uniform_(dtensor::empty({5, 7}, mesh, to));
      });
  expect_same_draw(
      mesh, "normal_", [] { return torch::empty({5, 7}, run_device()).normal_(1, 2); },
      [&](const Placements& to) { return dtensor::empty({5, 7}, mesh, to).normal_(1, 2); });
}

class DTensorRandom : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Every, DTensorRandom,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {2})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, DTensorRandom, ::testing::ValuesIn(cuda_backends()), backend_name);

TEST_P(DTensorRandom, EqualsOneDevice) {
  run(2, [] { expect_one_device_draws(init_device_mesh(run_device().type(), {2})); });
}

TEST_P(DTensorRandom, EqualsOneDeviceOnTwoDimensions) {
  run(4, [] { expect_one_device_draws(init_device_mesh(run_device().type(), {2, 2})); });
}

void expect_agreement(const DeviceMesh& mesh) {
  const auto drawn = dtensor::randn({4, 3}, mesh, {Shard(0)});
  const auto full = drawn.full_tensor();
  const auto same = dtensor::rand({4}, mesh).to_local();
  const auto fulls = all_gather(torch::cat({full.flatten(), same}).unsqueeze(0));
  for (int64_t other = 1; other < fulls.size(0); ++other)
    expect_bitwise_equal(fulls[other], fulls[0], c10::str("rank ", other));
  EXPECT_GT(full.std().item<double>(), 0.1) << "numbers, not a constant";
  EXPECT_FALSE(full.equal(dtensor::randn({4, 3}, mesh, {Shard(0)}).full_tensor()))
      << "the next draw is another";
}

TEST_P(DTensorRandom, RanksWithDifferentSeedsAgree) {
  run(3, [] {
    const auto mesh = init_device_mesh(run_device().type(), {3});
    torch::manual_seed(100 + rank());
    const auto own = torch::rand({3}, run_device());
    torch::manual_seed(100 + rank());
    expect_agreement(mesh);
    if (rank() != 0)
      expect_bitwise_equal(torch::rand({3}, run_device()), own, "a rank's own draws go on");
    // The mesh draws what its first rank would.
    torch::manual_seed(100);
    const auto expected = torch::randn({4, 3}, run_device());
    for (int i = 0; i < 2; ++i) {
      torch::manual_seed(100 + rank());
      expect_bitwise_equal(dtensor::randn({4, 3}, mesh, {Shard(0)}).full_tensor(), expected);
    }
    const auto ones = torch::ones({4, 3}, run_device());
    torch::manual_seed(100);
    const auto dropped = torch::dropout(ones, 0.5, true);
    torch::manual_seed(100 + rank());
    expect_bitwise_equal(full_of(torch::dropout(placed(ones, mesh, {Shard(0)}), 0.5, true)),
                         dropped, "dropout");
    if (rank() != 0)
      expect_bitwise_equal(torch::rand({3}, run_device()), own, "its own draws go on");
  });
}

TEST(DTensorRandomOnThreads, RanksThatShareAGeneratorAgree) { on_mesh({3}, expect_agreement); }

TEST(DTensorRandomOnThreads, SeedsCountWheneverTheyAreSet) {
  const auto expected = [](uint64_t seed) {
    auto generator = at::detail::createCPUGenerator(seed);
    const auto first = torch::randn({4, 3}, generator);
    return torch::cat({first, torch::rand({4, 3}, generator)});
  };
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    for (const uint64_t seed : {7, 8, 7, 7}) {
      barrier();
      torch::manual_seed(seed);
      const auto first = dtensor::randn({4, 3}, mesh, {Shard(0)}).full_tensor();
      const auto second = dtensor::rand({4, 3}, mesh, {Shard(1)}).full_tensor();
      expect_bitwise_equal(torch::cat({first, second}), expected(seed), c10::str("seed ", seed));
    }
  });
}

TEST_P(DTensorRandom, AttentionDropsWhatOneDeviceDrops) {
  run(2, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2});
    const auto whole = torch::sin(numbered({2, 3, 5, 4}, run_device()));
    const auto attend = [](const at::Tensor& x) {
      return at::scaled_dot_product_attention(x, x, x, {}, /*dropout_p=*/0.4);
    };
    torch::manual_seed(5);
    const auto expected = attend(whole);
    for (const auto& placement : {Replicate(), Shard(0), Shard(1), Shard(2)}) {
      torch::manual_seed(5);
      expect_equal(full_of(attend(placed(whole, mesh, {placement}))), expected,
                   c10::str(placement));
    }
  });
}

}  // namespace
}  // namespace tessera::testing
