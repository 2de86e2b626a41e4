// One test per error that a user of fully_shard can cause in training.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>

#include "base/torch_versions.h"
#include "fully_shard/models.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class FullyShardRuntimeErrors : public ::testing::TestWithParam<std::string> {
 protected:
  void run(const RankBody& body) { run_threads(2, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Every, FullyShardRuntimeErrors, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

TEST_P(FullyShardRuntimeErrors, ParametersWrittenInForward) {
  run([] {
    Block net;
    fully_shard(net);
    const auto handle = register_forward_pre_hook(net->up, [&](auto&, auto&) {
      const torch::NoGradGuard no_grad;
      net->up->weight.mul_(2);
    });
    const torch::NoGradGuard no_grad;
    EXPECT_THAT(message_of<c10::Error>([&] { net(torch::ones({1, 7})); }),
                AllOf(HasSubstr("fully_shard: parameter 'up.weight' of "),
                      HasSubstr("was written while it was whole"),
                      HasSubstr("change parameters outside of forward")));
    EXPECT_TRUE(is_dtensor(net->up->weight));
  });
}

TEST_P(FullyShardRuntimeErrors, ParametersWrittenAfterUnshard) {
  run([] {
    Block net;
    fully_shard(net);
    unshard(net);
    {
      const torch::NoGradGuard no_grad;
      net->gain.zero_();
    }
    EXPECT_THAT(message_of<c10::Error>([&] { reshard(net); }),
                HasSubstr("fully_shard: parameter 'gain' of "));
  });
}

TEST_P(FullyShardRuntimeErrors, ViewsThatOutliveTheirMemory) {
  if (!kCanRefuseAccess) GTEST_SKIP() << "this libtorch can't say why memory is gone";
  run([] {
    Stack net;
    const FullyShardOptions low{
        .mixed_precision = {.param_dtype = torch::kBFloat16, .cast_forward_inputs = true}};
    fully_shard(net->block(0), low);
    fully_shard(net, low);
    at::Tensor kept;
    const auto handle = register_forward_pre_hook(net->block(0)->up, [&](auto&, auto&) {
      kept = net->block(0)->up->weight.detach().view({-1});
    });
    net(torch::ones({1, 5}));
    EXPECT_THAT(message_of<c10::Error>([&] { kept.sum(); }),
                AllOf(HasSubstr("fully_shard: this memory held gathered parameters and was freed"),
                      HasSubstr("reshard_after_forward = false")));
  });
}

/// Keeps what it computed where no hook sees it.
struct HiddenImpl : torch::nn::Module {
  HiddenImpl() : layer(register_module("layer", nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x) {
    hidden = layer(x);
    return hidden.detach();
  }
  nn::Linear layer;
  at::Tensor hidden;
};
TESSERA_MODULE(Hidden);

TEST_P(FullyShardRuntimeErrors, OutputsThatWereNotSeen) {
  run([] {
    Hidden net;
    fully_shard(net);
    net(torch::ones({1, 5}));
    EXPECT_THAT(message_of<c10::Error>([&] { net->hidden.sum().backward(); }),
                AllOf(HasSubstr("fully_shard: parameter 'layer."),
                      HasSubstr("got a gradient, but no output of its forward was seen in this "
                                "backward; call the module itself")));
  });
}

struct CountingImpl : torch::nn::Module {
  CountingImpl() : layer(register_module("layer", nn::Linear(5, 5))) {}
  int64_t forward(const at::Tensor& x) { return layer(x).numel(); }
  nn::Linear layer;
};
TESSERA_MODULE(Counting);

TEST_P(FullyShardRuntimeErrors, OutputsWithoutTensors) {
  run([] {
    Counting net;
    fully_shard(net);
    EXPECT_THAT(message_of<c10::Error>([&] { net(torch::ones({1, 5})); }),
                AllOf(HasSubstr("fully_shard: expected the forward of "), HasSubstr("Counting"),
                      HasSubstr("to return tensors"), HasSubstr("tessera_tensors")));
    EXPECT_TRUE(is_dtensor(net->layer->weight));
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(net(torch::ones({1, 5})), 5);
  });
}

TEST_P(FullyShardRuntimeErrors, RanksThatReduceDifferentUnits) {
  run([] {
    nn::Linear first(5, 5);
    nn::Linear second(5, 5);
    fully_shard(first);
    fully_shard(second);
    const auto x = torch::ones({1, 5});
    const auto one = first(x).sum();
    const auto two = second(x).sum();
    EXPECT_THAT(message_of<c10::Error>([&] { (rank() == 0 ? one : two).backward(); }),
                AllOf(HasSubstr("fully_shard: expected all ranks to reduce the gradients of "),
                      HasSubstr("some reduced those of another unit")));
    EXPECT_TRUE(is_dtensor(first->weight));
    EXPECT_FALSE(first->weight.grad().defined());
  });
}

TEST_P(FullyShardRuntimeErrors, GradientsOfGradients) {
  run([] {
    Block net;
    fully_shard(net);
    const auto loss = net(torch::ones({1, 7})).square().sum();
    EXPECT_THAT(message_of<c10::NotImplementedError>(
                    [&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
                AllOf(HasSubstr("fully_shard: expected a gradient without a graph for parameter '"),
                      HasSubstr("create_graph = true")));
  });
}

TEST_P(FullyShardRuntimeErrors, SparseGradients) {
  run([] {
    nn::Embedding net(torch::nn::EmbeddingOptions(8, 4).sparse(true));
    fully_shard(net);
    const auto loss = net(torch::tensor({1, 2})).sum();
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] { loss.backward(); }),
                AllOf(HasSubstr("fully_shard: expected a dense gradient for parameter 'weight'"),
                      HasSubstr("sparse(false)")));
    EXPECT_TRUE(is_dtensor(net->weight));
  });
}

TEST_P(FullyShardRuntimeErrors, UseOfWholeParameters) {
  run([] {
    Block net;
    fully_shard(net);
    unshard(net);
    EXPECT_THAT(message_of<c10::Error>([&] { const SummonFullParams scope(net); }),
                HasSubstr("expected the parameters of "));
    reshard(net);
    const SummonFullParams scope(net);
    EXPECT_THAT(message_of<c10::Error>([&] { net(torch::ones({1, 7})); }),
                HasSubstr("but SummonFullParams shows them whole; call it after that scope"));
  });
}

}  // namespace
}  // namespace tessera::testing
