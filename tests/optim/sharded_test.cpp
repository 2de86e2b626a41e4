// Optimizers that need more of a matrix than a shard: sharded as on one device.
#include <tessera/tessera.h>

#include "optim/newton_schulz.h"
#include "support/ranks.h"
#include "support/tolerance.h"
#include "support/whole.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>

namespace tessera::testing {
namespace {

using Params = std::vector<at::Tensor>;
using Make = std::function<std::unique_ptr<optim::Optimizer>(Params)>;

const std::vector<std::vector<int64_t>> kMatrices = {{7, 5}, {16, 9}, {7, 5}, {2, 11},
                                                     {7, 5}, {16, 9}, {7, 5}};
std::vector<std::vector<int64_t>> every_shape() {
  auto shapes = kMatrices;
  shapes.insert(shapes.end(), {{13}, {1}, {3, 7, 4}});
  return shapes;
}

template <class Kind, class Options>
Make making(Options options) {
  return [options](Params params) { return std::make_unique<Kind>(std::move(params), options); };
}

Params random_values(const std::vector<std::vector<int64_t>>& shapes, int64_t seed) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  Params values;
  for (const auto& shape : shapes) values.push_back(at::randn(shape, generator));
  return values;
}

using Place = std::function<at::Tensor(const at::Tensor&)>;

/// Whole parameters after six steps; the third parameter gets no gradient in the second of them.
Params driven(const std::vector<std::vector<int64_t>>& shapes, const Make& make,
              const Place& place) {
  Params params;
  for (const at::Tensor& value : random_values(shapes, 0))
    params.push_back(place(value).requires_grad_());
  const auto optimizer = make(params);
  for (int step = 0; step < 6; ++step) {
    const Params grads = random_values(shapes, step + 1);
    for (const auto i : c10::irange(params.size()))
      params[i].mutable_grad() = step == 1 && i == 2 ? at::Tensor() : place(grads[i]);
    optimizer->step();
  }
  Params wholes;
  for (const at::Tensor& param : params) wholes.push_back(whole(param.detach()));
  return wholes;
}

void expect_as_on_one_device(int ranks, const std::vector<int64_t>& mesh_shape,
                             const std::vector<Placements>& every_placement,
                             const std::vector<std::vector<int64_t>>& shapes, const Make& make) {
  const Params expected = driven(shapes, make, [](const at::Tensor& value) { return value; });
  run_threads(ranks, [&] {
    const auto mesh = init_device_mesh(at::kCPU, mesh_shape);
    for (const Placements& placements : every_placement) {
      const auto place = [&](const at::Tensor& value) -> at::Tensor {
        Placements own = placements;
        for (Placement& one : own)
          if (one.is_shard() && one.dim() >= value.dim()) one = Shard(0);
        return distribute_tensor(value, mesh, own);
      };
      const Params actual = driven(shapes, make, place);
      for (const auto i : c10::irange(expected.size()))
        expect_equal(actual[i], expected[i], c10::str("parameter ", i, ", ", placements),
                     Tolerance{.rtol = 1e-5, .atol = 1e-5});
    }
  });
}

void expect_as_on_one_device(const std::vector<std::vector<int64_t>>& shapes, const Make& make) {
  for (const int ranks : {1, 2, 3})
    expect_as_on_one_device(ranks, {ranks}, {{Shard(0)}, {Shard(1)}, {Replicate()}}, shapes, make);
  expect_as_on_one_device(4, {2, 2},
                          {{Shard(0), Shard(1)},
                           {Shard(1), Shard(0)},
                           {Shard(0), Shard(0)},
                           {StridedShard(0, 2), Shard(0)},
                           {Replicate(), Shard(0)},
                           {Shard(1), Replicate()}},
                          shapes, make);
}

TEST(OptimShardedOnThreads, MuonIsAsOnOneDevice) {
  expect_as_on_one_device(kMatrices, making<optim::Muon>(optim::MuonOptions{.lr = 0.02}));
  expect_as_on_one_device(kMatrices,
                          making<optim::Muon>(optim::MuonOptions{
                              .lr = 0.02, .nesterov = false, .adjust_lr_fn = "match_rms_adamw"}));
}

TEST(OptimShardedOnThreads, AdafactorIsAsOnOneDevice) {
  expect_as_on_one_device(every_shape(),
                          making<optim::Adafactor>(optim::AdafactorOptions{.lr = 0.1}));
  expect_as_on_one_device(every_shape(), making<optim::Adafactor>(optim::AdafactorOptions{
                                             .lr = 0.1, .weight_decay = 0.1, .maximize = true}));
}

TEST(OptimSharded, MatricesIteratedTogetherAreAsOneByOne) {
  const optim::NewtonSchulz iteration{{3.4445, -4.7750, 2.0315}, 5, 1e-7};
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{9, 24}, {24, 9}}) {
    const Params matrices = random_values({shape, shape, shape}, 5);
    const auto batched = optim::orthogonalized(matrices, iteration, true);
    const auto single = optim::orthogonalized(matrices, iteration, false);
    for (const auto i : c10::irange(matrices.size())) {
      ASSERT_EQ(batched[i].sizes(), matrices[i].sizes());
      expect_equal(batched[i], single[i], "", Tolerance{.atol = 0.02});
      const at::Tensor values = at::linalg_svdvals(batched[i].to(at::kFloat));
      EXPECT_GT(values.min().item<float>(), 0.4);
      EXPECT_LT(values.max().item<float>(), 1.3);
    }
  }
}

TEST(OptimSharded, MatricesIteratedByWideProductsAreAsByThoseOfBfloat16) {
  optim::NewtonSchulz iteration{{3.4445, -4.7750, 2.0315}, 5, 1e-7};
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{24, 24}, {9, 24}, {24, 9}}) {
    const Params matrices = random_values({shape, shape}, 6);
    const auto expected = optim::orthogonalized(matrices, iteration, false);
    iteration.are_products_wide = true;
    const auto wide = optim::orthogonalized(matrices, iteration, false);
    iteration.are_products_wide = false;
    for (const auto i : c10::irange(matrices.size())) {
      EXPECT_EQ(wide[i].scalar_type(), at::kBFloat16);
      expect_equal(wide[i], expected[i], "", Tolerance{.atol = 0.02});
    }
  }
}

/// What one step of the optimizer sends, by kind.
comm_debug::Counts sent_by_step(int ranks, const Make& make) {
  comm_debug::Counts counts;
  run_threads(ranks, [&] {
    const auto mesh = init_device_mesh(at::kCPU, {ranks});
    Params params;
    for (const at::Tensor& value : random_values(every_shape(), 0))
      if (value.dim() == 2) params.push_back(distribute_tensor(value, mesh, {Shard(0)}));
    for (at::Tensor& param : params) {
      param.requires_grad_();
      param.mutable_grad() = at::ones_like(param.detach());
    }
    const auto optimizer = make(params);
    const comm_debug sent;
    optimizer->step();
    if (rank() == 0) counts = sent.counts();
  });
  return counts;
}

TEST(OptimShardedOnThreads, MuonDealsMatricesOut) {
  const auto counts = sent_by_step(3, making<optim::Muon>(optim::MuonOptions{}));
  // Four of one shape and two of another, there and back; one on its own is gathered.
  EXPECT_EQ(counts.at("all_to_all").collectives, 4);
  EXPECT_EQ(counts.at("all_gather").collectives, 1);
  EXPECT_EQ(counts.size(), 2U);
}

TEST(OptimShardedOnThreads, AdafactorSendsTwoMessages) {
  const auto counts = sent_by_step(3, making<optim::Adafactor>(optim::AdafactorOptions{}));
  EXPECT_EQ(counts.at("all_reduce").collectives, 2);
  EXPECT_EQ(counts.size(), 1U);
}

TEST(OptimShardedOnThreads, StateOfAdafactorIsAsLargeAsTheShard) {
  run_threads(2, [] {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    at::Tensor param = distribute_tensor(at::ones({6, 10}), mesh, {Shard(0)}).requires_grad_();
    param.mutable_grad() = at::ones_like(param.detach());
    optim::Adafactor optimizer({param});
    optimizer.step();
    const auto& state = optimizer.state_of(param);
    EXPECT_EQ(DTensor::of(state.at("row_var")).to_local().sizes(), (std::vector<int64_t>{3, 1}));
    EXPECT_EQ(DTensor::of(state.at("col_var")).to_local().sizes(), (std::vector<int64_t>{1, 10}));
    EXPECT_EQ(state.count("variance"), 0U);
  });
}

}  // namespace
}  // namespace tessera::testing
