// Stacks of layers of any width with plans drawn by seed, against the same stack without.
#include "parallel/models.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <random>

namespace tessera::testing {
namespace {

using Random = std::mt19937_64;

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

struct StackImpl : torch::nn::Module {
  explicit StackImpl(const std::vector<int64_t>& widths) {
    for (size_t i = 0; i + 1 < widths.size(); ++i) {
      layers->push_back(
          nn::Linear(torch::nn::LinearOptions(widths[i], widths[i + 1]).bias(i % 3 != 2)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = x;
    for (const auto& layer : *layers) y = layer->as<nn::Linear>()->forward(y).tanh();
    return y;
  }
  nn::ModuleList layers{register_module("layers", nn::ModuleList())};
};
TESSERA_MODULE(Stack);

/// What a layer finds: where its input is, and whether as a plain tensor.
struct State {
  Placement placement = Replicate();
  bool is_plain = true;
};

Placement draw_output(Random& random) {
  const Placement choices[] = {Replicate(), Shard(-1), Shard(0)};
  return choices[draw(random, 0, 2)];
}

/// A style for a layer that finds `state`, which becomes what the next one finds; none: left plain.
StylePtr draw_style(Random& random, State& state) {
  const bool is_whole = state.is_plain && state.placement == Replicate();
  const auto kind = draw(random, is_whole ? 0 : 1, 2);
  if (kind == 0) return nullptr;
  const auto input = state.placement;
  state = {draw_output(random), draw(random, 0, 1) == 1};
  if (kind == 1)
    return ColwiseParallel({.input_layouts = input,
                            .output_layouts = state.placement,
                            .use_local_output = state.is_plain});
  return RowwiseParallel({.input_layouts = input,
                          .output_layouts = state.placement,
                          .use_local_output = state.is_plain});
}

/// The whole of what came out.
at::Tensor gathered(const at::Tensor& output, const State& state, const at::Tensor& like) {
  if (is_dtensor(output)) return full_value(output);
  if (state.placement == Replicate()) return output;
  std::vector<int64_t> strides = {like.size(1), 1};
  return DTensor::from_local(output, mesh_of_all(), {state.placement},
                             {.shape = like.sizes().vec(), .stride = strides})
      .full_tensor();
}

void expect_plan_trains(uint64_t seed) {
  Random random(seed);
  std::vector<int64_t> widths;
  for (int64_t i = draw(random, 2, 6); i >= 0; --i) widths.push_back(draw(random, 1, 13));
  State state;
  std::vector<PlanEntry> plan;
  std::string text;
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    auto style = draw_style(random, state);
    text +=
        c10::str(" ", widths[i], style ? state.is_plain ? " plain " : " distributed " : " none ",
                 state.placement);
    if (style) plan.push_back({"layers." + std::to_string(i), style});
  }
  SCOPED_TRACE(c10::str("seed ", seed, ":", text, " ", widths.back()));
  if (plan.empty()) return;

  auto [plain, parallel] = twins<Stack>(seed, widths);
  parallelize_module(parallel, mesh_of_all(), plan);
  const int64_t rows = draw(random, 1, 3 * world_size());  // even or not, or too few for all
  const StepOptions steps{
      .steps = 2,
      .input =
          [&](int step) {
            return at::randn({rows, widths[0]}, at::detail::createCPUGenerator(seed + step));
          },
      .gathered = [&](const at::Tensor& output,
                      const at::Tensor& expected) { return gathered(output, state, expected); }};
  expect_equal_steps(plain, plain->parameters(), parallel, parallel->parameters(), steps);
  const auto parameters = parallel->named_parameters();
  for (const auto& item : plain->named_parameters())
    expect_equal(full_value(parameters[item.key()]).detach(), item.value().detach(), item.key());
}

void expect_plans_train() {
  for (uint64_t i = 0; i < 60 && !::testing::Test::HasFailure(); ++i)
    expect_plan_trains(test_seed() + i);
}

TEST(RandomPlansOnThreads, TrainLikeOneDeviceOn2) { run_threads(2, expect_plans_train); }
TEST(RandomPlansOnThreads, TrainLikeOneDeviceOn3) { run_threads(3, expect_plans_train); }
TEST(RandomPlans, TrainLikeOneDeviceOn4Processes) { run_processes(4, expect_plans_train); }

}  // namespace
}  // namespace tessera::testing
