// Models whose sequences lie on several ranks train as one device does.
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/dtensor.h>
#include <tessera/fully_shard.h>
#include <tessera/models.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "models/small_models.h"
#include "support/ranks.h"

#include <tuple>

namespace tessera::testing {
namespace {

using models::CausalLM;
using models::Family;

enum class Around { Replicate, FullyShard, TensorParallel, DataParallel, Checkpoint };
constexpr const char* kAround[] = {"Replicate", "FullyShard", "TensorParallel", "DataParallel",
                                   "Checkpoint"};

int ranks_of(Around around) {
  return around == Around::TensorParallel || around == Around::DataParallel ? 4 : 2;
}

/// What a step of one rank needs: the model, its mesh of the sequence, its rows of the batch.
struct Trained {
  CausalLM net;
  DeviceMesh cp;
  int64_t first_row = 0, rows = 2;
};

Trained spread_over_ranks(CausalLM net, Around around) {
  if (around == Around::TensorParallel) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"cp", "tp"});
    parallelize_module(net, mesh["tp"], models::tensor_plan(net));
    parallelize_module(net, mesh["cp"], models::context_plan(net));
    replicate(net, {.mesh = mesh["cp"]});
    return {net, mesh["cp"]};
  }
  const int64_t copies = around == Around::DataParallel ? 2 : 1;
  const auto mesh = init_device_mesh(at::kCPU, {copies, 2}, {"dp", "cp"});
  const auto all = mesh.flatten("dp_cp");
  parallelize_module(net, mesh["cp"], models::context_plan(net));
  if (around == Around::Checkpoint) {
    for (const auto& block : net->blocks()) checkpoint(block);
  }
  if (around == Around::FullyShard) {
    for (const auto& block : net->blocks()) fully_shard(block, {.mesh = all});
    fully_shard(net, {.mesh = all});
  } else {
    replicate(net, {.mesh = all});
  }
  if (around != Around::DataParallel) return {net, mesh["cp"]};
  return {net, mesh["cp"], mesh.local_rank("dp"), 1};
}

std::vector<double> train(CausalLM& net, const at::Tensor& tokens, const at::Tensor& targets) {
  optim::AdamW optimizer(net->parameters(), {.lr = 1e-2});
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto loss = net->loss(tokens, targets);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

CausalLM in_double(const models::DecoderConfig& config) {
  auto net = small_model(config);
  net->to(at::kDouble);
  return net;
}

using ContextCase = std::tuple<Family, Around>;
class ContextParallelModelsOnThreads : public ::testing::TestWithParam<ContextCase> {};

TEST_P(ContextParallelModelsOnThreads, TrainAsOneRankDoes) {
  const auto [family, around] = GetParam();
  const auto config = small_config(family, /*is_tied=*/around == Around::TensorParallel);
  auto reference = in_double(config);
  const auto batch = small_batch();
  const auto expected = train(reference, batch.tokens, batch.targets);
  run_threads(ranks_of(around), [&, around = around] {
    auto trained = spread_over_ranks(in_double(config), around);
    const auto part = [&](const at::Tensor& whole) {
      return context_parallel_shard(whole.narrow(0, trained.first_row, trained.rows), 1,
                                    trained.cp);
    };
    const auto losses = train(trained.net, part(batch.tokens), part(batch.targets));
    for (size_t step = 0; step < losses.size(); ++step) {
      const auto mean = all_reduce(at::tensor(losses[step], at::kDouble), ReduceOp::AVG);
      EXPECT_NEAR(mean.item<double>(), expected[step], 1e-9) << "step " << step;
    }
    const auto parameters = trained.net->named_parameters();
    for (const auto& item : reference->named_parameters()) {
      auto value = parameters[item.key()].detach();
      if (is_dtensor(value)) value = DTensor::of(value).full_tensor();
      if (around == Around::TensorParallel && item.key().find("c_attn") != std::string::npos)
        value = unpack_rows(value, 3, 2);
      EXPECT_LE((value - item.value()).abs().max().item<double>(), 1e-7) << item.key();
    }
  });
}

std::string name_of_context_case(const ::testing::TestParamInfo<ContextCase>& chosen) {
  const auto [family, around] = chosen.param;
  return std::string(models::name_of(family)) + kAround[static_cast<size_t>(around)];
}

INSTANTIATE_TEST_SUITE_P(
    Families, ContextParallelModelsOnThreads,
    ::testing::Combine(::testing::Values(Family::GPT2, Family::Llama, Family::Qwen2, Family::Qwen3),
                       ::testing::Values(Around::Replicate, Around::FullyShard,
                                         Around::TensorParallel, Around::DataParallel,
                                         Around::Checkpoint)),
    name_of_context_case);

class CompiledContextModels : public ::testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Families, CompiledContextModels,
                         ::testing::Values(Family::GPT2, Family::Qwen3), [](const auto& chosen) {
                           return std::string(models::name_of(chosen.param));
                         });

TEST_P(CompiledContextModels, TrainAsTheyDoEagerly) {
  const auto config = small_config(GetParam(), /*is_tied=*/true);
  const auto batch = small_batch();
  run_processes(2, [&] {
    auto eager = spread_over_ranks(small_model(config), Around::Checkpoint);
    auto compiled = spread_over_ranks(small_model(config), Around::Checkpoint);
    optim::AdamW eager_optimizer(eager.net->parameters(), {.lr = 1e-3, .fused = true});
    optim::AdamW optimizer(compiled.net->parameters(), {.lr = 1e-3, .fused = true});
    const auto step_of = [](CausalLM& net, optim::AdamW& used) {
      return [&](at::Tensor tokens, at::Tensor targets) {
        used.zero_grad();
        const auto loss = net->loss(tokens, targets);
        loss.backward();
        used.step();
        return loss;
      };
    };
    auto program = compile(step_of(compiled.net, optimizer), {.module = compiled.net,
                                                              .optimizer = optimizer,
                                                              .fullgraph = true,
                                                              .backend = "interpret"});
    const auto step = step_of(eager.net, eager_optimizer);
    const auto tokens = context_parallel_shard(batch.tokens, 1, eager.cp);
    const auto targets = context_parallel_shard(batch.targets, 1, eager.cp);
    for (int i = 0; i < 4; ++i)
      EXPECT_NEAR(program(tokens, targets).item<double>(), step(tokens, targets).item<double>(),
                  1e-5)
          << "step " << i;
  });
}

/// Ranks have different numbers of targets that count: losses are weighed by them.
TEST(ContextParallelLossOnThreads, IsTheMeanOverAllTargetsThatCount) {
  const auto config = small_config(Family::Llama, false);
  auto reference = in_double(config);
  const auto batch = small_batch();
  auto targets = batch.targets.clone();
  targets.narrow(1, 8, 4).fill_(-100);
  const auto expected = reference->loss(batch.tokens, targets);
  expected.backward();
  run_threads(2, [&] {
    auto [net, cp, first, rows] = spread_over_ranks(in_double(config), Around::Replicate);
    const auto local = context_parallel_shard(targets, 1, cp);
    const auto count = (local != -100).sum().to(at::kDouble);
    const auto mean_count = all_reduce(count, ReduceOp::AVG, cp.group());
    const auto loss =
        net->loss(context_parallel_shard(batch.tokens, 1, cp), local) * (count / mean_count);
    loss.backward();
    EXPECT_NEAR(all_reduce(loss.detach(), ReduceOp::AVG).item<double>(), expected.item<double>(),
                1e-9);
    const auto parameters = net->named_parameters();
    for (const auto& item : reference->named_parameters())
      EXPECT_LE((parameters[item.key()].grad() - item.value().grad()).abs().max().item<double>(),
                1e-9)
          << item.key();
  });
}

}  // namespace
}  // namespace tessera::testing
