#pragma once

#include <tessera/replicate.h>

#include "compose/on_device.h"
#include "replicate/models.h"
#include "support/tolerance.h"

/// Gradients that are averaged by hand, and tests that run on every device: bodies of ranks.
namespace tessera::testing {

inline at::Tensor rows_of(int rank, std::vector<int64_t> shape, uint64_t seed = 7) {
  return drawn_on_device(shape, seed + 100 * static_cast<uint64_t>(rank));
}

/// The mean over the ranks of what `local` has after a backward of its own.
inline std::vector<at::Tensor> averaged_by_hand(const torch::nn::Module& local) {
  std::vector<at::Tensor> means;
  for (const auto& parameter : local.parameters()) {
    const auto gradient =
        parameter.grad().defined() ? parameter.grad().to_dense() : at::zeros_like(parameter);
    means.push_back(all_reduce(gradient, ReduceOp::AVG));
  }
  return means;
}

inline void expect_averages(const torch::nn::Module& replicated, const torch::nn::Module& local,
                            const Tolerance& tolerance = {.rtol = 1e-5, .atol = 1e-6}) {
  const auto expected = averaged_by_hand(local);
  const auto parameters = replicated.named_parameters();
  ASSERT_EQ(parameters.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& gradient = parameters[i].value().grad();
    ASSERT_TRUE(gradient.defined()) << parameters[i].key();
    EXPECT_EQ(gradient.device(), run_device()) << parameters[i].key();
    expect_equal(gradient.to_dense(), expected[i], parameters[i].key(), tolerance);
  }
}

inline void takes_rank_zeros_values() {
  auto net = on_device(seeded(static_cast<uint64_t>(rank()), [] { return Wide(); }));
  const auto expected = on_device(seeded(0, [] { return Wide(); }));
  replicate(net);
  net(rows_of(rank(), {2, 7}));
  for (const auto& item : net->named_parameters())
    expect_bitwise_equal(item.value(), expected->named_parameters()[item.key()], item.key());
}

inline void finds_unused_parameters() {
  auto [local, parallel] = device_twins<Branches>(5);
  replicate(parallel, {.find_unused_parameters = true});
  for (uint64_t step = 0; step < 3; ++step) {
    const bool goes_left = rank() == 0 || step == 2;  // another branch per rank, then the same
    const auto x = rows_of(rank(), {2, 6}, step);
    local->zero_grad();
    parallel->zero_grad();
    local(x, goes_left).sum().backward();
    parallel(x, goes_left).sum().backward();
    EXPECT_FALSE(parallel->spare->weight.grad().defined()) << "unused on all ranks";
    EXPECT_EQ(parallel->right->weight.grad().defined(), step < 2);
    const auto left = local->left->weight.grad();
    const auto mean =
        all_reduce(left.defined() ? left : at::zeros({6, 6}, run_device()), ReduceOp::AVG);
    expect_equal(parallel->left->weight.grad(), mean, "left");
  }
}

inline void averages_sparse_gradients() {
  auto [local, parallel] = device_twins<Words>(8);
  replicate(parallel);
  for (int step = 0; step < 3; ++step) {
    const auto x = at::arange(rank(), 2 * rank() + 2).to(run_device());  // uneven numbers of rows
    local->zero_grad();
    parallel->zero_grad();
    local(x).pow(2).sum().backward();
    parallel(x).pow(2).sum().backward();
    EXPECT_TRUE(parallel->words->weight.grad().is_sparse());
    expect_averages(*parallel, *local);
  }
}

}  // namespace tessera::testing
