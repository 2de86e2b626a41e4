// REQUIREMENTS.md 1.2, test by test: a step that was written for one rank, as a step of all.
#include <tessera/compile.h>
#include <tessera/dtensor.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "compose/on_device.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;
using ::testing::HasSubstr;
using Batch = std::tuple<torch::Tensor, torch::Tensor>;

struct SimpleMlpImpl : torch::nn::Module {
  tnn::Linear net1{50, 32}, net2{32, 8};
  SimpleMlpImpl() {
    register_module("net1", net1);
    register_module("net2", net2);
  }
  torch::Tensor forward(torch::Tensor x) { return torch::sigmoid(net2(torch::relu(net1(x)))); }
};
TESSERA_MODULE(SimpleMlp);

struct BatchShapesImpl : torch::nn::Module {
  SimpleMlp mlp;
  BatchShapesImpl() { register_module("mlp", mlp); }
  torch::Tensor forward(torch::Tensor x) {
    const auto rows = x.size(0);
    auto out = mlp(x);
    const auto flat = out.clone().view({-1}).squeeze().unsqueeze(0);
    out = out + 0.1 * flat.view({rows, -1});
    const auto sums =
        torch::arange(8, x.device()).unsqueeze(0) + torch::ones(out.sizes(), x.device());
    return out + sums + torch::zeros({8}, x.device()).unsqueeze(0).repeat({rows, 1});
  }
};
TESSERA_MODULE(BatchShapes);

struct TransposedImpl : torch::nn::Module {
  SimpleMlp mlp;
  TransposedImpl() { register_module("mlp", mlp); }
  torch::Tensor forward(torch::Tensor x) { return mlp(x.t().contiguous()).t(); }
};
TESSERA_MODULE(Transposed);

enum class Data { Same /* on all ranks, as in the reference tests */, OfEachRank };

Batch draw(std::vector<int64_t> x, std::vector<int64_t> y, Data data) {
  torch::manual_seed(data == Data::Same ? 11 : 11 + rank());
  const auto inputs = torch::randn(x).to(run_device());
  return {inputs, torch::randn(y).to(run_device())};
}

const auto train_step = [](auto& net, auto& optimizer, const Batch& batch) {
  optimizer.zero_grad();
  const auto& [inputs, labels] = batch;
  auto loss = (net(inputs) - labels).sum();
  loss.backward();
  optimizer.step();
  return loss;
};

torch::Tensor gathered(const torch::Tensor& parameter) {
  EXPECT_TRUE(is_dtensor(parameter));
  return DTensor::of(parameter).redistribute({Replicate()}).to_local();
}

struct Shapes {
  std::vector<int64_t> x = {128, 50}, y = {128, 8};
  int64_t batch_dim = 0;
};

/// Warm-up, then `steps` of the step by hand on a replicated copy, and compiled.
template <class Net, class MakeOptimizer>
void expect_parity(const std::string& style, MakeOptimizer make_optimizer, const Shapes& shapes,
                   const std::string& backend, int steps = 3) {
  SCOPED_TRACE(style + ", " + backend);
  auto [net, copy] = device_twins<Net>(1234);
  replicate(copy);
  auto optimizer = make_optimizer(net->parameters());
  auto copy_optimizer = make_optimizer(copy->parameters());
  const auto warm_up = draw(shapes.x, shapes.y, Data::Same);
  train_step(net, optimizer, warm_up);
  optimizer.zero_grad();
  train_step(copy, copy_optimizer, warm_up);
  copy_optimizer.zero_grad();

  auto compiled =
      compile([](Net& module, decltype(optimizer)& opt,
                 const Batch& batch) { return train_step(module, opt, batch); },
              {.parallel_mode = DataParallel(style, {.input_batch_dim = shapes.batch_dim}),
               .backend = backend});
  for (int i = 0; i < steps; ++i) {
    const auto batch = draw(shapes.x, shapes.y, i == 0 ? Data::Same : Data::OfEachRank);
    const auto wanted = train_step(copy, copy_optimizer, batch);
    const auto loss = compiled(net, optimizer, batch);
    EXPECT_TRUE(torch::allclose(loss, wanted, 1e-5, 1e-3)) << loss << wanted;
    const auto parameters = net->parameters(), reference = copy->parameters();
    for (size_t k = 0; k < parameters.size(); ++k) {
      EXPECT_TRUE(torch::allclose(gathered(parameters[k]), reference[k], 1.3e-6, 1e-5))
          << style << ", step " << i << ", parameter " << k << ": "
          << (gathered(parameters[k]) - reference[k]).abs().max().template item<double>();
      EXPECT_TRUE(torch::allclose(gathered(parameters[k].grad()), reference[k].grad(), 1e-5, 1e-4))
          << style << ", step " << i << ", gradient " << k;
    }
  }
}

template <class Net, class MakeOptimizer>
void expect_parity(const std::string& style, MakeOptimizer make_optimizer,
                   const Shapes& shapes = {}) {
  for (const auto* backend : {"interpret", "codegen"})
    expect_parity<Net>(style, make_optimizer, shapes, backend);
}

void expect_whole(SimpleMlp& net, SimpleMlp& copy, const std::string& style) {
  const auto parameters = net->parameters(), reference = copy->parameters();
  for (size_t k = 0; k < parameters.size(); ++k)
    EXPECT_TRUE(torch::allclose(gathered(parameters[k]), reference[k], 1.3e-6, 1e-5))
        << style << ", parameter " << k;
}

const auto sgd = [](double momentum, bool foreach) {
  return [=](auto parameters) {
    return optim::SGD(parameters, {.lr = 0.1, .momentum = momentum, .foreach = foreach});
  };
};
const auto fused_adam = [](auto parameters) {
  return optim::Adam(parameters, {.lr = 0.1, .fused = true});
};

class DataParallelRanks : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Every, DataParallelRanks, ::testing::ValuesIn(cpu_backends()),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, DataParallelRanks, ::testing::ValuesIn(cuda_backends()),
                         backend_name);

TEST_P(DataParallelRanks, R_002_1_ReplicateWithSgd) {
  run(2, [] {
    expect_parity<SimpleMlp>("replicate", sgd(0, false));
    expect_parity<SimpleMlp>("replicate", sgd(0.9, false));
    expect_parity<SimpleMlp>("replicate", sgd(0.9, true));
  });
}

TEST_P(DataParallelRanks, R_002_2_ReplicateWithFusedAdam) {
  run(2, [] { expect_parity<SimpleMlp>("replicate", fused_adam); });
}

TEST_P(DataParallelRanks, R_002_3_FullyShardWithSgd) {
  run(2, [] {
    expect_parity<SimpleMlp>("fully_shard", sgd(0, false));
    expect_parity<SimpleMlp>("fully_shard", sgd(0.9, false));
    expect_parity<SimpleMlp>("fully_shard", sgd(0.9, true));
  });
}

TEST_P(DataParallelRanks, R_002_4_FullyShardWithFusedAdam) {
  run(2, [] { expect_parity<SimpleMlp>("fully_shard", fused_adam); });
}

TEST_P(DataParallelRanks, R_002_5_ShapesThatSpeakOfTheBatch) {
  run(2, [] {
    for (const auto* style : {"replicate", "fully_shard"})
      expect_parity<BatchShapes>(style, sgd(0, false));
  });
}

TEST_P(DataParallelRanks, R_002_6_FullyShardWithAnotherBatchDimension) {
  run(2, [] {
    expect_parity<Transposed>("fully_shard", fused_adam,
                              {.x = {50, 128}, .y = {8, 128}, .batch_dim = 1});
  });
}

TEST_P(DataParallelRanks, ShardsUnevenRows) {
  run(3, [] {
    expect_parity<SimpleMlp>("fully_shard", fused_adam);
    expect_parity<SimpleMlp>("fully_shard", sgd(0.9, true));
  });
}

/// Calls of other sizes have programs of their own; what is distributed stays so.
TEST_P(DataParallelRanks, TakesBatchesOfOtherSizes) {
  run(2, [] {
    for (const auto* style : {"replicate", "fully_shard"}) {
      auto [net, copy] = device_twins<SimpleMlp>(1234);
      replicate(copy);
      auto optimizer = fused_adam(net->parameters()),
           copy_optimizer = fused_adam(copy->parameters());
      const auto first = draw({8, 50}, {8, 8}, Data::Same);
      train_step(net, optimizer, first);
      train_step(copy, copy_optimizer, first);
      optimizer.zero_grad();
      auto compiled = compile([](SimpleMlp& module, optim::Adam& opt,
                                 const Batch& batch) { return train_step(module, opt, batch); },
                              {.parallel_mode = DataParallel(style)});
      for (const int64_t rows : {8, 6, 6, 8, 3, 6, 8}) {
        const auto batch = draw({rows, 50}, {rows, 8}, Data::OfEachRank);
        const auto wanted = train_step(copy, copy_optimizer, batch);
        EXPECT_TRUE(torch::allclose(compiled(net, optimizer, batch), wanted, 1e-5, 1e-3));
        expect_whole(net, copy, style);
      }
      EXPECT_THAT(explain(compiled), HasSubstr("captured again, because of a change in sizes"));
    }
  });
}

TEST_P(DataParallelRanks, TrainsWithStockSgd) {
  run(2, [] {
    for (const auto* style : {"replicate", "fully_shard"}) {
      expect_parity<SimpleMlp>(style, [](auto parameters) {
        return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
      });
    }
  });
}

/// NCCL does not compare calls.
TEST(DataParallelErrorsRanks, NameBatchesOfDifferentSizesOnAllRanks) {
  for (const auto* backend : {"shm", "gloo"}) {
    run_processes(
        2,
        [] {
          SimpleMlp net;
          auto optimizer = sgd(0, false)(net->parameters());
          auto compiled = compile([](SimpleMlp& module, optim::SGD& opt,
                                     const Batch& batch) { return train_step(module, opt, batch); },
                                  {.parallel_mode = DataParallel(DataParallelStyle::FullyShard)});
          const auto call = [&](int64_t rows) {
            compiled(net, optimizer, draw({rows, 50}, {rows, 8}, Data::OfEachRank));
          };
          call(4);
          EXPECT_THAT(
              [&] { call(rank() == 0 ? 4 : 6); },
              ::testing::ThrowsMessage<c10::Error>(HasSubstr("compiled calls of one kind")));
        },
        {.backend = backend});
  }
}

TEST(DataParallelErrorsRanks, NameOptimizersThatCountOnTheHost) {
  run_processes(2, [] {
    SimpleMlp net;
    torch::optim::Adam optimizer(net->parameters());
    auto named = compile([](SimpleMlp& module, torch::optim::Adam& opt,
                            const Batch& batch) { return train_step(module, opt, batch); },
                         {.parallel_mode = DataParallel("replicate")});
    const auto batch = draw({4, 50}, {4, 8}, Data::Same);
    EXPECT_THAT([&] { named(net, optimizer, batch); },
                ::testing::ThrowsMessage<c10::Error>(HasSubstr(
                    "got torch::optim::Adam, whose steps depend on numbers of the host")));
  });
}

TEST(DataParallelErrorsRanks, NameNumbersOfTheHost) {
  run_processes(2, [] {
    SimpleMlp net;
    int64_t calls = 0;
    auto step = compile(
        [&](SimpleMlp& module, const Batch& batch) {
          module->zero_grad();
          auto loss = (module(std::get<0>(batch)) * static_cast<double>(++calls)).sum();
          loss.backward();
          return loss.detach();
        },
        {.parallel_mode = DataParallel("replicate")});
    EXPECT_THAT([&] { step(net, draw({4, 50}, {4, 8}, Data::Same)); },
                ::testing::ThrowsMessage<c10::Error>(
                    HasSubstr("expected a step that is the same at each call")));
  });
}

TEST(DataParallelErrorsRanks, NameWhatIsWrittenBesides) {
  run_processes(2, [] {
    SimpleMlp net;
    auto count = torch::zeros({});
    auto step = compile(
        [&](SimpleMlp& module, torch::Tensor x) {
          const torch::NoGradGuard no_grad;
          count.add_(1);
          return module(x).sum();
        },
        {.parallel_mode = DataParallel("replicate")});
    EXPECT_THAT([&] { step(net, torch::ones({4, 50})); },
                ::testing::ThrowsMessage<c10::Error>(HasSubstr("but it writes outside")));
  });
}

TEST(DataParallelErrorsRanks, NameParametersThatRanksWouldUpdateDifferently) {
  run_processes(2, [] {
    for (const auto* style : {"replicate", "fully_shard"}) {
      SimpleMlp net;
      const auto before = net->net1->bias.detach().clone();
      auto step = compile(
          [](SimpleMlp& module, torch::Tensor x) {
            auto loss = module(x).sum();
            const auto gradients = torch::autograd::grad({loss}, {module->net1->bias});
            const torch::NoGradGuard no_grad;
            module->net1->bias.sub_(gradients[0] * 0.1);
            return loss;
          },
          {.parallel_mode = DataParallel(style)});
      EXPECT_THAT([&] { step(net, torch::ones({4, 50})); },
                  ::testing::ThrowsMessage<c10::ValueError>(
                      HasSubstr("DataParallel: expected net1.bias to be updated by gradients that "
                                "backward() leaves")));
      EXPECT_FALSE(is_dtensor(net->net1->bias));
      EXPECT_TRUE(torch::equal(net->net1->bias, before));
    }
  });
}

TEST(DataParallelErrorsRanks, NameGradientsThatBackwardDidNotLeave) {
  run_processes(2, [] {
    SimpleMlp net;
    auto step = compile(
        [](SimpleMlp& module, torch::Tensor x) {
          auto loss = module(x).sum();
          auto& bias = module->net1->bias;
          bias.mutable_grad() = torch::autograd::grad({loss}, {bias})[0].clone();
          return loss;
        },
        {.parallel_mode = DataParallel("replicate")});
    EXPECT_THAT([&] { step(net, torch::ones({4, 50})); },
                ::testing::ThrowsMessage<c10::ValueError>(HasSubstr(
                    "DataParallel: expected net1.bias to have a gradient that backward() leaves")));
  });
}

TEST(DataParallelErrors, NameTheStyles) {
  for (const std::string style : {"default", "replicate", "fully_shard"})
    EXPECT_NO_THROW(DataParallel{style});
  EXPECT_THAT([] { DataParallel("replicated"); },
              ::testing::ThrowsMessage<c10::ValueError>(
                  HasSubstr("expected parallel_style \"replicate\", \"fully_shard\" or "
                            "\"default\", got \"replicated\"")));
}

}  // namespace
}  // namespace tessera::testing
