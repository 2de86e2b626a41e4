// Mixed precision of replicate, compress wrappers, delayed averages.
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "replicate/averages.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct PrecisionCase {
  const char* name;
  DDPMixedPrecision dtypes;
  at::ScalarType reduced;
};
const PrecisionCase kPrecisions[] = {
    {"BFloat16", {.param_dtype = at::kBFloat16}, at::kBFloat16},
    {"ReducedInFloat", {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}, at::kFloat},
    {"Half", {.param_dtype = at::kHalf, .reduce_dtype = at::kHalf}, at::kHalf},
};

class MixedPrecisionOf : public ::testing::TestWithParam<PrecisionCase> {};
INSTANTIATE_TEST_SUITE_P(OnThreads, MixedPrecisionOf, ::testing::ValuesIn(kPrecisions),
                         [](const auto& info) { return std::string(info.param.name); });

/// Gradients of `master` by hand: a copy in the smaller dtype computes, ranks average in `reduced`.
void set_gradients_by_hand(Wide& master, const at::Tensor& x, const PrecisionCase& which) {
  Wide low;
  low->to(*which.dtypes.param_dtype);
  const auto from = master->parameters(), to = low->parameters();
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }
  low(x.to(*which.dtypes.param_dtype)).pow(2).sum().backward();
  for (size_t i = 0; i < to.size(); ++i) {
    const auto sent = to[i].grad().to(at::kFloat).to(which.reduced);
    from[i].mutable_grad() = all_reduce(sent, ReduceOp::AVG).to(at::kFloat);
  }
}

TEST_P(MixedPrecisionOf, ComputesInItAndKeepsParameters) {
  run_threads(2, [which = GetParam()] {
    auto [by_hand, net] = twins<Wide>(3);
    replicate(net, {.bucket_cap_mb = 0.01, .mixed_precision = which.dtypes});
    std::vector<at::ScalarType> inside;
    register_forward_hook(net->mid, [&](auto& /*module*/, auto& arguments, auto& /*result*/) {
      inside = {net->mid->weight.scalar_type(), arguments.tensor(0).scalar_type()};
    });
    torch::optim::SGD expected(by_hand->parameters(), 1e-3), optimizer(net->parameters(), 1e-3);
    for (uint64_t step = 0; step < 4; ++step) {
      const auto x = rows_of(rank(), {3, 7}, step);
      const auto loss = net(x).pow(2).sum();
      EXPECT_THAT(inside, ElementsAre(*which.dtypes.param_dtype, *which.dtypes.param_dtype));
      optimizer.zero_grad();
      loss.backward();
      set_gradients_by_hand(by_hand, x, which);
      const auto reference = by_hand->named_parameters();
      for (const auto& item : net->named_parameters()) {
        EXPECT_EQ(item.value().scalar_type(), at::kFloat) << item.key();
        ASSERT_EQ(item.value().grad().scalar_type(), at::kFloat) << item.key();
        EXPECT_TRUE(at::allclose(item.value().grad(), reference[item.key()].grad(), 1e-6, 1e-6))
            << item.key() << ", step " << step;
      }
      expected.step();
      optimizer.step();
    }
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(at::allclose(item.value(), by_hand->named_parameters()[item.key()], 1e-6, 1e-6));
  });
}

TEST(MixedPrecisionOnThreads, AddsUpGradientsInTheParametersDtype) {
  run_threads(2, [] {
    auto net = seeded(3, [] { return Net(); });
    replicate(net, {.mixed_precision = DDPMixedPrecision{.param_dtype = at::kBFloat16}});
    at::Tensor once;
    for (int i = 0; i < 3; ++i) {
      {
        const NoSync no_sync(net);
        net(torch::ones({1, 2})).sum().backward();
      }
      if (i == 0) once = net->fc1->weight.grad().clone();
    }
    EXPECT_EQ(net->fc1->weight.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::allclose(net->fc1->weight.grad(), once * 3));
  });
}

/// Without a backward, or without a gradient, parameters are themselves again as well.
TEST(MixedPrecisionOnThreads, LeavesNothingCastBehind) {
  run_threads(2, [] {
    Branches net;
    replicate(net, {.find_unused_parameters = true,
                    .mixed_precision = DDPMixedPrecision{.param_dtype = at::kBFloat16}});
    const auto x = torch::ones({1, 6});
    {
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(net(x, true).scalar_type(), at::kBFloat16);
      for (const auto& each : net->parameters()) EXPECT_EQ(each.scalar_type(), at::kFloat);
    }
    const auto loss = net(x, true).sum();
    EXPECT_EQ(net->spare->weight.scalar_type(), at::kBFloat16);
    loss.backward();
    for (const auto& each : net->parameters()) EXPECT_EQ(each.scalar_type(), at::kFloat);
  });
}

TEST(MixedPrecisionOnThreads, CastsBuffersOnceAndServesTheWrapper) {
  run_threads(2, [] {
    nn::BatchNorm1d norm(4);
    DistributedDataParallel wrapper(
        norm, {.mixed_precision = DDPMixedPrecision{.buffer_dtype = at::kDouble}});
    EXPECT_EQ(norm->running_mean.scalar_type(), at::kDouble);
    EXPECT_EQ(norm->num_batches_tracked.scalar_type(), at::kLong);
    EXPECT_EQ(norm->weight.scalar_type(), at::kFloat);
  });
}

TEST(MixedPrecisionErrors, WritesBetweenForwardAndBackward) {
  run_threads(1, [] {
    Net net;
    replicate(net, {.mixed_precision = DDPMixedPrecision{.param_dtype = at::kBFloat16}});
    const auto loss = net(torch::ones({1, 2})).sum();
    {
      const torch::NoGradGuard no_grad;
      net->fc1->bias.add_(1);
    }
    EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }),
                HasSubstr("'fc1.bias' to be left alone between a forward and the end"));
    PlainNet plain;
    EXPECT_THAT(message_of<c10::ValueError>(
                    [&] { replicate(plain, {.mixed_precision = DDPMixedPrecision{}}); }),
                HasSubstr("whose calls can be hooked for mixed_precision"));
  });
}

at::Tensor gradients_with(const CommHook& hook) {
  auto net = seeded(3, [] { return Wide(); });
  replicate(net);
  register_comm_hook(net, hook);
  net(rows_of(rank(), {3, 7})).pow(2).sum().backward();
  return net->mid->weight.grad().clone();
}

TEST(CompressWrapperOnThreads, GivesAnyHookASmallerBucket) {
  run_threads(2, [] {
    EXPECT_TRUE(at::equal(gradients_with(fp16_compress_wrapper(allreduce_hook)),
                          gradients_with(fp16_compress_hook)));
    EXPECT_TRUE(at::equal(gradients_with(bf16_compress_wrapper(allreduce_hook)),
                          gradients_with(bf16_compress_hook)));
    const auto halved = gradients_with(fp16_compress_wrapper([](GradBucket& bucket) {
      EXPECT_EQ(bucket.buffer().scalar_type(), at::kHalf);
      EXPECT_EQ(bucket.gradients()[0].scalar_type(), at::kHalf);
      bucket.buffer().mul_(0.5);
      return allreduce_hook(bucket);
    }));
    EXPECT_TRUE(at::allclose(halved * 2, gradients_with(fp16_compress_hook), 1e-2, 1e-3));
    const auto rank_one = powersgd_hook({.start_powerSGD_iter = 0});
    EXPECT_EQ(gradients_with(bf16_compress_wrapper(rank_one)).scalar_type(), at::kFloat);
    EXPECT_THAT(message_of<c10::ValueError>([] { fp16_compress_wrapper({}); }),
                HasSubstr("fp16_compress_wrapper: expected a function"));
  });
}

TEST(DelayedOnThreads, SendsTheNamedTogetherWithTheLast) {
  run_threads(2, [] {
    auto [local, net] = twins<Net>(3);
    replicate(net, {.bucket_cap_mb = 1e-6,
                    .delay_all_reduce_named_params = {"fc3.weight", "fc3.bias", "fc2.bias"},
                    .param_to_hook_all_reduce = "fc1.bias"});
    for (uint64_t step = 0; step < 3; ++step) {
      const auto x = rows_of(rank(), {3, 2}, step);
      local->zero_grad();
      net->zero_grad();
      local(x).pow(2).sum().backward();
      net(x).pow(2).sum().backward();
      expect_averages(*net, *local);
    }
    const auto stats = replicate_state(net)->engine()->stats();
    EXPECT_EQ(stats.bucket_parameters.size(), 3) << "fc2.weight, fc1.weight, and the others";
    EXPECT_THAT(stats.bucket_parameters,
                ::testing::Contains(ElementsAre("fc3.weight", "fc3.bias", "fc2.bias", "fc1.bias")));
  });
}

TEST(DelayedErrors, NamesThatAreNotThere) {
  run_threads(1, [] {
    Net net;
    EXPECT_THAT(message_of<c10::ValueError>(
                    [&] { replicate(net, {.delay_all_reduce_named_params = {"fc3.weight"}}); }),
                HasSubstr("param_to_hook_all_reduce together"));
    replicate(net, {.delay_all_reduce_named_params = {"fc3.weight"},
                    .param_to_hook_all_reduce = "fc9.weight"});
    EXPECT_THAT(message_of<c10::ValueError>([&] { net(torch::ones({1, 2})); }),
                HasSubstr("got 'fc9.weight'"));
  });
}

}  // namespace
}  // namespace tessera::testing
