// What must be refused, or noticed, rather than give a result that looks right.
#include <tessera/dtensor.h>
#include <tessera/optim.h>

#include "support/message_of.h"
#include "support/ranks.h"
#include "support/tolerance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using ::testing::HasSubstr;

void on_two_ranks(const std::function<void(const DeviceMesh& mesh)>& body) {
  testing::run_threads(2, [&] { body(init_device_mesh(torch::kCPU, {2})); }, {.backend = "shm"});
}

DTensor sharded(at::IntArrayRef sizes, const DeviceMesh& mesh, int64_t dim = 0) {
  return distribute_tensor(
      torch::arange(c10::multiply_integers(sizes)).to(torch::kFloat).view(sizes), mesh,
      {Shard(dim)}, std::nullopt);
}

TEST(DTensorGuardsOnThreads, SizesThatDoNotFitAreAnErrorThoughTheirPartsFit) {
  on_two_ranks([](const DeviceMesh& mesh) {
    const auto four = sharded({4, 5}, mesh);
    const auto two = sharded({2, 5}, mesh);  // parts [2, 5] and [1, 5]: they would broadcast
    EXPECT_THAT(testing::message_of<c10::Error>([&] { four + two; }), HasSubstr("must match"));
    EXPECT_THAT(testing::message_of<c10::Error>([&] { four.logical_and(two); }),
                HasSubstr("must match"));
    EXPECT_THAT(testing::message_of<c10::Error>([&] { at::Tensor(four).clone().add_(two); }),
                HasSubstr("must match"));
    EXPECT_THAT(testing::message_of<c10::Error>([&] { four.mm(sharded({6, 5}, mesh)); }),
                HasSubstr("cannot be multiplied"));
  });
}

TEST(DTensorGuardsOnThreads, TensorsOfTwoMeshesDoNotMixInLists) {
  testing::run_threads(4,
                       [] {
                         const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
                         std::vector<at::Tensor> left{sharded({4}, mesh["tp"])};
                         std::vector<at::Tensor> right{sharded({4}, mesh["dp"])};
                         EXPECT_THAT(testing::message_of([&] { at::_foreach_add_(left, right); }),
                                     HasSubstr("one mesh"));
                       },
                       {.backend = "shm"});
}

TEST(DTensorGuardsOnThreads, OptimizerStatePlacedOtherwiseIsRefused) {
  on_two_ranks([](const DeviceMesh& mesh) {
    const auto replicated = [&] { return DTensor::from_local(torch::zeros({4, 5}), mesh); };
    std::vector<at::Tensor> parameters{sharded({4, 5}, mesh)};
    std::vector<at::Tensor> gradients{sharded({4, 5}, mesh)};
    std::vector<at::Tensor> first{replicated()};
    std::vector<at::Tensor> second{replicated()};
    std::vector<at::Tensor> steps{torch::zeros({})};
    EXPECT_THAT(testing::message_of([&] {
                  at::_fused_adam_(parameters, gradients, first, second, {}, steps, 1e-3, 0.9,
                                   0.999, 0, 1e-8, false, false);
                }),
                HasSubstr("lies as its parameter does"));
  });
}

TEST(DTensorGuardsOnThreads, AsyncResultsDoNotShareMemoryWithTheSource) {
  on_two_ranks([](const DeviceMesh& mesh) {
    const auto whole = DTensor::from_local(torch::ones({4}), mesh);
    auto part = whole.redistribute({Shard(0)}, /*async_op=*/true);
    part.zero_();
    testing::expect_equal(whole.to_local(), torch::ones({4}));
  });
}

TEST(DTensorGuardsOnThreads, WritingToThePartIsNoticedByAutograd) {
  on_two_ranks([](const DeviceMesh& mesh) {
    auto x = sharded({4}, mesh);
    x.requires_grad_();
    const auto loss = (x * x).sum();
    {
      const torch::NoGradGuard no_grad;
      x.to_local().mul_(10);
    }
    EXPECT_THAT(testing::message_of<c10::Error>([&] { loss.backward(); }),
                HasSubstr("modified by an inplace operation"));
  });
}

TEST(DTensorGuardsOnThreads, PlainGradientsOfDistributedTensorsAreRefused) {
  on_two_ranks([](const DeviceMesh& mesh) {
    auto x = sharded({4}, mesh);
    x.requires_grad_();
    EXPECT_THAT(testing::message_of<c10::TypeError>(
                    [&] { x.redistribute({Replicate()}).backward(torch::ones({4})); }),
                HasSubstr("expected a distributed gradient"));
    const auto local = x.to_local(Placements{Replicate()});
    EXPECT_THAT(testing::message_of([&] { local.sum().backward(); }), HasSubstr("grad_placements"));
  });
}

TEST(DTensorGuardsOnThreads, AveragedPartsGetTheirShareOfTheGradient) {
  on_two_ranks([](const DeviceMesh& mesh) {
    auto local = torch::ones({3}).requires_grad_();
    const auto mean = DTensor::from_local(local, mesh, {Partial(ReduceOp::AVG)});
    DTensor::of((mean * mean).sum()).full_tensor().backward();
    testing::expect_equal(local.grad(), torch::full({3}, 1.0));  // 2 * value / ranks
    auto extreme = torch::ones({3}).requires_grad_();
    const auto maximum = DTensor::from_local(extreme, mesh, {Partial(ReduceOp::MAX)});
    EXPECT_THAT(testing::message_of<c10::NotImplementedError>(
                    [&] { DTensor::of(maximum.sum()).full_tensor().backward(); }),
                HasSubstr("not differentiable"));
  });
}

TEST(DTensorGuardsOnThreads, EmptyShardsInTheMiddleAreSeen) {
  testing::run_threads(6,
                       [] {
                         const auto mesh = init_device_mesh(torch::kCPU, {2, 3});
                         const auto x = distribute_tensor(torch::arange(7).to(torch::kFloat), mesh,
                                                          {Shard(0), Shard(0)},
                                                          std::nullopt);  // 2 2 0 | 1 1 1
                         EXPECT_EQ(DTensor::of(x.amax()).full_tensor().item<float>(), 6);
                       },
                       {.backend = "shm"});
}

TEST(DTensorGuardsOnThreads, DistributedAndPlainGradientsAreClippedTogether) {
  on_two_ranks([](const DeviceMesh& mesh) {
    std::vector<at::Tensor> plain;
    std::vector<at::Tensor> mixed;
    for (const double value : {3.0, 4.0}) {
      plain.push_back(torch::zeros({2}).requires_grad_());
      plain.back().mutable_grad() = torch::full({2}, value);
    }
    mixed.push_back(distribute_tensor(plain[0].detach(), mesh, {Shard(0)}, std::nullopt));
    mixed[0].requires_grad_();
    mixed[0].mutable_grad() = distribute_tensor(plain[0].grad(), mesh, {Shard(0)}, std::nullopt);
    mixed.push_back(torch::zeros({2}).requires_grad_());
    mixed[1].mutable_grad() = plain[1].grad().clone();
    const auto expected = optim::clip_grad_norm_(plain, 1.0);
    testing::expect_equal(optim::clip_grad_norm_(mixed, 1.0), expected);
    testing::expect_equal(DTensor::of(mixed[0].grad()).full_tensor(), plain[0].grad());
    testing::expect_equal(mixed[1].grad(), plain[1].grad());
  });
}

}  // namespace
}  // namespace tessera
