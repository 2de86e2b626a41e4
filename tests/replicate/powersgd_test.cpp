#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "replicate/models.h"
#include "support/message_of.h"
#include "support/peer.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <limits>
#include <mutex>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

at::Tensor input_of(int rank, std::vector<int64_t> shape, uint64_t seed = 7) {
  auto generator = at::detail::createCPUGenerator(seed + 100 * rank);
  return at::randn(shape, generator);
}

/// Calls a hook as the engine does, with gradients of the caller's.
class Driver {
 public:
  Driver(CommHook hook, std::vector<at::Tensor> parameters)
      : hook_(std::move(hook)), parameters_(std::move(parameters)) {}

  std::vector<at::Tensor> average(const std::vector<at::Tensor>& gradients) {
    int64_t elements = 0;
    for (const auto& gradient : gradients) elements += gradient.numel();
    GradBucket bucket(0, /*is_last=*/true, at::empty({elements}), parameters_, default_group());
    const auto views = bucket.gradients();
    for (size_t i = 0; i < views.size(); ++i) views[i].copy_(gradients[i]);
    const auto future = hook_(bucket);
    future->wait();
    EXPECT_TRUE(future->value().toTensor().is_same(bucket.buffer()));
    std::vector<at::Tensor> results;
    for (const auto& view : views) results.push_back(view.clone());
    return results;
  }

 private:
  CommHook hook_;
  std::vector<at::Tensor> parameters_;
};

int64_t rank_of(const at::Tensor& matrix) {
  const auto values = at::linalg_svdvals(matrix.to(at::kDouble));
  return (values > values[0] * 1e-5).sum().item<int64_t>();
}

TEST(PowerSgdOnThreads, SendsMatricesOfTheGivenRankAndVectorsAsTheyAre) {
  for (const int64_t rank_asked : {1, 2, 4}) {
    run_threads(3, [rank_asked] {
      Driver driver(powersgd_hook({.matrix_approximation_rank = rank_asked,
                                   .start_powerSGD_iter = 0,
                                   .use_error_feedback = false}),
                    {at::zeros({30, 40}), at::zeros({40}), at::zeros({3, 3})});
      const std::vector<at::Tensor> own = {input_of(rank(), {30, 40}), input_of(rank(), {40}, 8),
                                           input_of(rank(), {3, 3}, 9)};
      const auto results = driver.average(own);
      EXPECT_EQ(rank_of(results[0]), rank_asked);
      EXPECT_TRUE(at::allclose(results[1], all_reduce(own[1], ReduceOp::AVG)));
      EXPECT_TRUE(at::allclose(results[2], all_reduce(own[2], ReduceOp::AVG)))
          << "too small to be compressed";
      const auto all = all_gather(results[0].unsqueeze(0), 0);
      for (int other = 1; other < 3; ++other) EXPECT_TRUE(at::equal(all[other], all[0]));
    });
  }
}

TEST(PowerSgdOnThreads, OfFullRankGivesTheAverage) {
  for (const bool batched : {false, true}) {
    run_threads(2, [batched] {
      // Rows fewer than columns, more than columns, a pair of one shape, a kernel of four
      // dimensions in another memory format.
      std::vector<at::Tensor> parameters = {
          at::zeros({6, 9}), at::zeros({9, 6}), at::zeros({6, 9}),
          at::zeros({5, 2, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast)};
      Driver driver(powersgd_hook({.matrix_approximation_rank = 100,
                                   .start_powerSGD_iter = 0,
                                   .min_compression_rate = 0.01,
                                   .batch_tensors_with_same_shape = batched}),
                    parameters);
      for (uint64_t step = 0; step < 3; ++step) {
        std::vector<at::Tensor> own;
        for (const auto& parameter : parameters)
          own.push_back(input_of(rank(), parameter.sizes().vec(), 10 * step + own.size()));
        const auto results = driver.average(own);
        for (size_t i = 0; i < own.size(); ++i)
          EXPECT_TRUE(at::allclose(results[i], all_reduce(own[i], ReduceOp::AVG), 1e-4, 1e-5)) << i;
      }
    });
  }
}

TEST(PowerSgdOnThreads, ErrorFeedbackBringsWhatWasLeftOutLater) {
  const auto relative_error = [](bool feedback, int steps) {
    Driver driver(powersgd_hook({.start_powerSGD_iter = 0, .use_error_feedback = feedback}),
                  {at::zeros({12, 12})});
    const auto own = input_of(rank(), {12, 12});
    const auto mean = all_reduce(own, ReduceOp::AVG);
    auto sum = at::zeros_like(own);
    for (int step = 0; step < steps; ++step) sum += driver.average({own})[0];
    return ((sum / steps - mean).norm() / mean.norm()).item<double>();
  };
  run_threads(2, [&] {
    const double early = relative_error(true, 20);
    const double late = relative_error(true, 200);
    EXPECT_LT(late, early / 5) << "the rest stays bounded while the sum grows";
    EXPECT_LT(late, 0.1);
    EXPECT_GT(relative_error(false, 200), 0.5);
  });
}

TEST(PowerSgdOnThreads, WarmStartFindsTheDominantDirection) {
  const auto relative_error = [](bool warm_start) {
    Driver driver(
        powersgd_hook(
            {.start_powerSGD_iter = 0, .use_error_feedback = false, .warm_start = warm_start}),
        {at::zeros({20, 20})});
    const auto [u, s, v] = at::linalg_svd(input_of(0, {20, 20}).to(at::kDouble));
    const auto values = at::pow(0.7, at::arange(20, at::kDouble));  // falls off slowly
    const auto matrix = u.matmul(at::diag(values)).matmul(v).to(at::kFloat);
    at::Tensor result;
    for (int step = 0; step < 40; ++step) result = driver.average({matrix})[0];
    // 1: no worse than the best approximation of rank 1.
    return ((result - matrix).norm() / values.slice(0, 1).norm()).item<double>();
  };
  run_threads(2, [&] {
    EXPECT_NEAR(relative_error(true), 1, 1e-3);
    EXPECT_GT(relative_error(false), 1.01);
  });
}

TEST(PowerSgdOnThreads, RecoversFromGradientsOfZeroAndOfInfinity) {
  run_threads(2, [] {
    for (const double bad : {0.0, std::numeric_limits<double>::infinity()}) {
      Driver driver(powersgd_hook({.start_powerSGD_iter = 0}), {at::zeros({16, 16})});
      const auto own = input_of(rank(), {16, 16});
      driver.average({own});
      const auto during = driver.average({at::full({16, 16}, bad)})[0];
      EXPECT_EQ(at::isfinite(during).all().item<bool>(), bad == 0) << "hidden from scalers";
      const auto mean = all_reduce(own, ReduceOp::AVG);
      auto sum = at::zeros_like(mean);
      for (int step = 0; step < 100; ++step) sum += driver.average({own})[0];
      EXPECT_LT(((sum / 100 - mean).norm() / mean.norm()).item<double>(), 0.3);
    }
  });
}

TEST(PowerSgdOnThreads, AveragesExactlyBeforeItsStart) {
  run_threads(2, [] {
    auto [plain, compressed] = twins<Wide>(3);
    replicate(plain);
    replicate(compressed, {.bucket_cap_mb = 0.05});
    register_comm_hook(compressed, powersgd_hook({.start_powerSGD_iter = 3}));
    for (uint64_t step = 0; step < 5; ++step) {
      const auto x = input_of(rank(), {3, 7}, step);
      for (auto* net : {&plain, &compressed}) {
        (*net)->zero_grad();
        (*net)(x).pow(2).sum().backward();
      }
      const auto& exact = plain->mid->weight.grad();
      const auto& gradient = compressed->mid->weight.grad();
      EXPECT_EQ(at::allclose(gradient, exact), step < 3) << step;
      EXPECT_EQ(rank_of(gradient) == 1, step >= 3) << step;
      EXPECT_TRUE(at::allclose(compressed->mid->bias.grad(), plain->mid->bias.grad(), 1e-4, 1e-5));
    }
  });
}

TEST(PowerSgdOnThreads, TrainsAlmostAsWellAsTheAverage) {
  const auto last_loss = [](const CommHook& hook) {
    auto net = seeded(3, [] { return Wide(); });
    replicate(net, {.overlap = true});
    if (hook) register_comm_hook(net, hook);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    const auto x = input_of(rank(), {32, 7});
    const auto target = x.flip(1).sin();
    at::Tensor loss;
    for (int step = 0; step < 150; ++step) {
      optimizer.zero_grad();
      loss = torch::mse_loss(net(x), target);
      loss.backward();
      optimizer.step();
    }
    return all_reduce(loss.detach(), ReduceOp::AVG).item<double>();
  };
  run_threads(2, [&] {
    auto untrained = seeded(3, [] { return Wide(); });
    const auto x = input_of(rank(), {32, 7});
    const double start = torch::mse_loss(untrained(x), x.flip(1).sin()).item<double>();
    EXPECT_LT(last_loss({}), start / 50);
    EXPECT_LT(last_loss(powersgd_hook({.matrix_approximation_rank = 2, .start_powerSGD_iter = 10})),
              start / 20);
  });
}

TEST(PowerSgd, RefusesOptionsThatMakeNoSense) {
  const auto message = [](PowerSGDOptions options) {
    return message_of<c10::ValueError>([&] { powersgd_hook(options); });
  };
  EXPECT_THAT(message({.matrix_approximation_rank = 0}), HasSubstr("matrix_approximation_rank"));
  EXPECT_THAT(message({.start_powerSGD_iter = -1}), HasSubstr("start_powerSGD_iter"));
  EXPECT_THAT(message({.min_compression_rate = 0}), HasSubstr("min_compression_rate"));
  EXPECT_THAT(message({.orthogonalization_epsilon = -1e-8}),
              HasSubstr("orthogonalization_epsilon"));
}

constexpr const char* kScript = R"py(
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
init_process_group(backend="gloo")
torch.manual_seed(42)
model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                      nn.Linear(64, 3))
ddp = DDP(model)
ddp.register_comm_hook(powersgd.PowerSGDState(
    process_group=None, matrix_approximation_rank=int(inputs["rank"].item()), start_powerSGD_iter=3, random_seed=5,
    use_error_feedback=bool(inputs["feedback"].item()), warm_start=bool(inputs["warm"].item()),
    batch_tensors_with_same_shape=bool(inputs["batched"].item())), powersgd.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for step in range(inputs["data"].shape[0]):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(inputs["data"][step, rank]), inputs["target"][step, rank])
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
outputs["losses"] = torch.stack(losses)
outputs.update({name: p.detach() for name, p in model.named_parameters()})
)py";

struct Case {
  const char* name;
  int64_t rank;
  bool feedback = true;
  bool warm = true;
  bool batched = false;
};
void PrintTo(const Case& which, std::ostream* out) { *out << which.name; }  // NOLINT: gtest's name

class PowerSgdPeer : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(PyTorch, PowerSgdPeer,
                         ::testing::Values(Case{"Rank1", 1}, Case{"Rank2", 2}, Case{"Rank4", 4},
                                           Case{"Batched", 2, true, true, true},
                                           Case{"WithoutFeedback", 2, false},
                                           Case{"ColdStart", 2, true, false}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(PowerSgdPeer, DrawsTheSameNumbersAndTrainsToTheSameParameters) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const auto& which = GetParam();
  torch::manual_seed(7);
  const auto data = torch::randn({15, 2, 4, 10});
  const auto target = torch::randn({15, 2, 4, 3});
  const auto number = [](double value) { return torch::tensor({value}); };
  const auto peers = run_peers(2, kScript,
                               {{"data", data},
                                {"target", target},
                                {"rank", number(static_cast<double>(which.rank))},
                                {"feedback", number(which.feedback)},
                                {"warm", number(which.warm)},
                                {"batched", number(which.batched)}});
  run_threads(2, [&] {
    auto model = seeded(42, [] {
      nn::Sequential layers;  // one by one: arguments would be drawn in any order
      for (const int64_t in : {10, 64, 64}) {
        layers->push_back(nn::Linear(in, 64));
        layers->push_back(nn::Tanh());
      }
      layers->push_back(nn::Linear(64, 3));
      return layers;
    });
    replicate(model);
    register_comm_hook(model, powersgd_hook({.matrix_approximation_rank = which.rank,
                                             .start_powerSGD_iter = 3,
                                             .use_error_feedback = which.feedback,
                                             .warm_start = which.warm,
                                             .random_seed = 5,
                                             .batch_tensors_with_same_shape = which.batched}));
    torch::optim::SGD optimizer(model->parameters(), 0.05);
    for (int64_t step = 0; step < data.size(0); ++step) {
      optimizer.zero_grad();
      const auto output = model->forward<at::Tensor>(data[step][rank()]);
      const auto loss = torch::mse_loss(output, target[step][rank()]);
      loss.backward();
      optimizer.step();
      EXPECT_NEAR(loss.item<double>(), peers[rank()]["losses"][step].item<double>(), 1e-4) << step;
    }
    for (const auto& item : model->named_parameters()) {
      const auto error = (item.value() - peers[rank()][item.key()]).abs().max().item<double>();
      EXPECT_LT(error, 1e-4) << item.key();
    }
  });
}

TEST(PowerSgdOnThreads, GoesOnWithWhatWasSaved) {
  for (const bool batched : {false, true}) {
    run_threads(2, [batched] {
      torch::nn::Sequential net(torch::nn::Linear(30, 40), torch::nn::Linear(40, 30));
      const PowerSGDOptions options{.matrix_approximation_rank = 2,
                                    .start_powerSGD_iter = 1,
                                    .batch_tensors_with_same_shape = batched};
      auto straight = std::make_shared<PowerSGDState>(options);
      auto later = std::make_shared<PowerSGDState>(options);
      Driver first(straight->hook(), net->parameters()), second(later->hook(), net->parameters());
      const auto gradients = [&](int iteration) {
        std::vector<at::Tensor> all;
        for (const auto& parameter : net->parameters())
          all.push_back(input_of(rank(), parameter.sizes().vec(), 7 + iteration));
        return all;
      };
      for (int i = 0; i < 3; ++i) first.average(gradients(i));
      auto saved = straight->save(*net);
      saved["other"] = "entry";
      later->load(*net, saved);
      for (int i = 3; i < 6; ++i) {
        const auto wanted = first.average(gradients(i)), got = second.average(gradients(i));
        for (size_t k = 0; k < got.size(); ++k)
          EXPECT_TRUE(at::equal(got[k], wanted[k])) << i << " " << k;
      }
      later->load(*net, {});
      EXPECT_EQ(later->save(*net).size(), 2) << "begun anew";
    });
  }
}

TEST(PowerSgdErrors, WhatWasSavedOfAnotherModel) {
  run_threads(1, [] {
    const auto make = [](int64_t width) {
      return torch::nn::Sequential(
          torch::nn::Linear(torch::nn::LinearOptions(width, 40).bias(false)));
    };
    auto net = make(30), other = make(20);
    auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{.start_powerSGD_iter = 0});
    Driver(state->hook(), net->parameters()).average({input_of(0, {40, 30})});
    const auto saved = state->save(*net);
    EXPECT_THAT(message_of([&] { state->load(*other, saved); }),
                HasSubstr("PowerSGDState::load: expected 3200 bytes of powersgd/0.weight/error, "
                          "got 4800"));
    EXPECT_THAT(message_of([&] { state->load(*net, {{"powersgd/iteration", "x"}}); }),
                HasSubstr("an iteration 'x'"));
    EXPECT_EQ(state->save(*net), saved) << "an error changes nothing";
  });
}

}  // namespace
}  // namespace tessera::testing
