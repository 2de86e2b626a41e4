// "replicate", "fully_shard" and "default" by what ranks hold and send: placements, rows and bytes
// of parameters and optimizer state as they lie, after one step and after ten.
#include "parallel_cases.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// 15 and 4 rows, on 3 ranks: 5 each, and 2, 2 and 0.
void layers(PartsImpl& net) {
  net.parameter(torch::randn({15, 6}, real()));
  net.parameter(torch::randn({15}, real()));
  net.parameter(torch::randn({4, 15}, real()));
}

ParallelCase mlp() {
  return {"", layers,
          [](PartsImpl& net, const Tensors& given) -> Tensors {
            const auto hidden = torch::relu(torch::linear(given[0], net.p[0], net.p[1]));
            return {torch::mse_loss(hidden.mm(net.p[2].t()), given[1])};
          },
          [](int64_t count) -> Tensors {
            const auto x = torch::randn({count, 6}, real());
            return {x, torch::randn({count, 4}, real())};
          }};
}

int64_t own_rows(int64_t rows) {
  const int64_t each = (rows + world_size() - 1) / world_size();
  return std::clamp<int64_t>(rows - each * rank(), 0, each);
}

/// Bytes that this rank has; checks each tensor's placement and rows.
int64_t check_held(const Tensor& tensor, bool is_sharded, const std::string& what) {
  EXPECT_TRUE(is_dtensor(tensor)) << what;
  if (!is_dtensor(tensor)) return 0;
  const auto distributed = DTensor::of(tensor);
  const auto local = distributed.to_local();
  EXPECT_EQ(distributed.placements(), Placements{is_sharded ? Shard(0) : Replicate()}) << what;
  EXPECT_EQ(local.size(0), is_sharded ? own_rows(tensor.size(0)) : tensor.size(0)) << what;
  return static_cast<int64_t>(local.nbytes());
}

template <class Optimizer>
void check_all_held(Parts& net, Optimizer& optimizer, bool is_sharded, const std::string& when) {
  int64_t parameters = 0, states = 0, kinds = 0;
  for (size_t i = 0; i < net->p.size(); ++i) {
    const auto what = when + ", parameter " + std::to_string(i);
    parameters += check_held(net->p[i], is_sharded, what);
    check_held(net->p[i].grad(), is_sharded, what + ".grad");
    for (const auto& [name, tensor] : optimizer.state_of(net->p[i])) {
      if (tensor.dim() == 0) continue;  // numbers, such as the count of steps
      states += check_held(tensor, is_sharded, what + ", " + name);
      kinds += i == 0 ? 1 : 0;
    }
  }
  const int64_t rows = is_sharded ? own_rows(15) * 7 + own_rows(4) * 15 : 15 * 7 + 4 * 15;
  EXPECT_EQ(parameters, rows * 8) << when;
  EXPECT_GT(kinds, 0);
  EXPECT_EQ(states, kinds * rows * 8) << when;
}

struct Sent {
  std::string code, text;
};

template <class MakeOptimizer>
Sent train(const std::string& style, bool is_sharded, const std::string& backend,
           MakeOptimizer make, DataParallelOptions options = {}) {
  auto net = make_parts(mlp());
  auto optimizer = make(net->parameters());
  torch::manual_seed(3);
  train_parts(net, optimizer, mlp().draw(4));
  optimizer.zero_grad();
  auto compiled =
      compile([](Parts& module, decltype(optimizer)& opt,
                 const Tensors& given) { return train_parts(module, opt, given); },
              {.parallel_mode = DataParallel(style, std::move(options)), .backend = backend});
  for (int i = 1; i <= 10; ++i) {
    torch::manual_seed(10 * i + rank());
    compiled(net, optimizer, mlp().draw(4));
    if (i == 1 || i == 10)
      check_all_held(net, optimizer, is_sharded, style + ", step " + std::to_string(i));
  }
  return {generated_code(compiled), explain(compiled)};
}

const auto momentum = [](auto parameters) {
  return optim::SGD(parameters, {.lr = 0.01, .momentum = 0.9});
};
const auto fused_adam = [](auto parameters) {
  return optim::Adam(parameters, {.lr = 0.01, .fused = true});
};

const auto kAllReduces =
    AllOf(HasSubstr("all_reduce"), Not(HasSubstr("reduce_scatter")), Not(HasSubstr("all_gather")));
const auto kScattersAndGathers =
    AllOf(Not(HasSubstr("all_reduce")), HasSubstr("reduce_scatter"), HasSubstr("all_gather"));

class DataParallelStylesRanks : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Of, DataParallelStylesRanks,
                         ::testing::ValuesIn(device_cases(torch::kCPU, {"shm"}, {2})),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, DataParallelStylesRanks, ::testing::ValuesIn(cuda_backends()),
                         backend_name);

TEST_P(DataParallelStylesRanks, ReplicateKeepsAllOnEveryRank) {
  run(3, [] {
    for (const auto* backend : {"interpret", "codegen"}) {
      EXPECT_THAT(train("replicate", false, backend, momentum).code, kAllReduces);
      EXPECT_THAT(train("replicate", false, backend, fused_adam).code, kAllReduces);
    }
  });
}

TEST_P(DataParallelStylesRanks, FullyShardKeepsRowsOnEachRank) {
  run(3, [] {
    for (const auto* backend : {"interpret", "codegen"}) {
      EXPECT_THAT(train("fully_shard", true, backend, momentum).code, kScattersAndGathers);
      EXPECT_THAT(train("fully_shard", true, backend, fused_adam).code, kScattersAndGathers);
    }
  });
}

TEST_P(DataParallelStylesRanks, AreTheSameAsOneDevice) {
  run(3, [] {
    const DataParallelOptions as_one{.semantics = DataParallelSemantics::OneDevice};
    EXPECT_THAT(train("fully_shard", true, "interpret", fused_adam, as_one).code,
                AllOf(HasSubstr("reduce_scatter"), HasSubstr("all_gather")));
    EXPECT_THAT(train("replicate", false, "interpret", momentum, as_one).code, kAllReduces);
  });
}

/// Parameters and gradients of 165 doubles each, and two of Adam's states.
TEST_P(DataParallelStylesRanks, DefaultChoosesByTheBudget) {
  run(3, [] {
    constexpr int64_t kReplicated =
        165 * 8 * 4 + 3 * 4;  // and counts of steps; the rate is besides
    const auto fits =
        train("default", false, "interpret", fused_adam, {.memory_budget = kReplicated + 16});
    EXPECT_THAT(fits.code, kAllReduces);
    EXPECT_THAT(fits.text, HasSubstr("DataParallel: \"default\" is \"replicate\": parameters, "
                                     "gradients and optimizer state take "));
    const auto exceeds =
        train("default", true, "interpret", fused_adam, {.memory_budget = kReplicated - 16});
    EXPECT_THAT(exceeds.code, kScattersAndGathers);
    EXPECT_THAT(exceeds.text, HasSubstr("\"default\" is \"fully_shard\""));
    const auto free = train("default", false, "interpret", fused_adam);  // a few KiB fit
    EXPECT_THAT(free.text, HasSubstr("\"default\" is \"replicate\""));
  });
}

/// A later program may need more; what is distributed stays as it is.
TEST_P(DataParallelStylesRanks, DefaultIsChosenOnce) {
  run(2, [] {
    auto net = make_parts(mlp());
    auto optimizer = fused_adam(net->parameters());
    torch::manual_seed(3);
    train_parts(net, optimizer, mlp().draw(4));
    optimizer.zero_grad();
    constexpr int64_t kWithoutState = 165 * 8 * 2;
    auto compiled = compile(
        [](Parts& module, optim::Adam& opt, const Tensors& given, bool trains) -> Tensors {
          if (trains) return train_parts(module, opt, given);
          const torch::NoGradGuard no_grad;
          return module(given);
        },
        {.parallel_mode =
             DataParallel(DataParallelStyle::Default, {.memory_budget = kWithoutState + 100}),
         .backend = "interpret"});
    compiled(net, optimizer, mlp().draw(4), false);
    compiled(net, optimizer, mlp().draw(4), true);
    EXPECT_THAT(generated_code(compiled), kAllReduces);
    check_held(net->p[0], false, "parameter");
  });
}

}  // namespace
}  // namespace tessera::testing
