// Frozen parameters send no gradient that tells when backward has read them for the last time.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>

#include "fully_shard/models.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

struct FrozenMiddleImpl : torch::nn::Module {
  explicit FrozenMiddleImpl(int calls)
      : calls(calls),
        first(register_module("first", nn::Linear(5, 7))),
        frozen(register_module("frozen", nn::Linear(7, 7))),
        last(register_module("last", nn::Linear(7, 3))) {
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = first(x);
    for (int call = 0; call < calls; ++call) y = frozen(y).tanh();
    return last(y);
  }
  int calls;
  nn::Linear first, frozen, last;
};
TESSERA_MODULE(FrozenMiddle);

TrainingOptions sgd_on_split_batch() {
  return {.steps = 4,
          .optimizer = sgd(0.1, 0.9),
          .input = {12, 5},
          .local_batch_of = default_group(),
          .full = whole,
          .tolerance = Tolerance{.rtol = 1e-4, .atol = 1e-5}};
}

class FrozenParameters : public ::testing::TestWithParam<std::string> {
 protected:
  void run(const RankBody& body) { run_processes(2, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Every, FrozenParameters, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

TEST_P(FrozenParameters, OfAUnitThatRunsTwice) {
  run([] {
    auto [reference, sharded] = twins<FrozenMiddle>(3, 2);
    fully_shard(sharded->frozen);
    fully_shard(sharded);
    expect_training_parity(reference, sharded, sgd_on_split_batch());
  });
}

TEST_P(FrozenParameters, OfAModuleBeforeATrainedOneInTheSameUnit) {
  run([] {
    auto [reference, sharded] = twins<FrozenMiddle>(4, 1);
    fully_shard({sharded->frozen, sharded->last}, {.reshard_after_forward = true});
    fully_shard(sharded);
    expect_training_parity(reference, sharded, sgd_on_split_batch());
  });
}

TEST_P(FrozenParameters, AreFreedBeforeTheEndOfBackward) {
  run([] {
    auto net = seeded(5, [] { return FrozenMiddle(1); });
    fully_shard({net->frozen, net->last}, {.reshard_after_forward = true});
    fully_shard(net);
    const auto output = net(torch::randn({2, 5}));
    bool is_whole_at_end = true;
    register_post_accumulate_grad_hook(net->first->bias, [&](const at::Tensor&) {
      is_whole_at_end = fully_shard_state(net->last)->is_unsharded();
    });
    output.sum().backward();
    EXPECT_FALSE(is_whole_at_end);
  });
}

}  // namespace
}  // namespace tessera::testing
