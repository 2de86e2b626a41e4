#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "replicate/averages.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Variant {
  const char* name;
  ReplicateOptions options;
  std::string backend = "shm";
};
const Variant kVariants[] = {
    {"Defaults", {}},
    {"SmallBuckets", {.bucket_cap_mb = 0.0001}},
    {"Overlapped", {.bucket_cap_mb = 0.001, .overlap = true}},
    {"AtTheEnd", {.bucket_cap_mb = 0.001, .overlap = false}},
    {"Views", {.gradient_as_bucket_view = true}},
    {"ViewsInSmallBuckets",
     {.bucket_cap_mb = 0.001, .gradient_as_bucket_view = true, .overlap = true}},
    {"StaticGraph", {.static_graph = true}},
    {"UnusedSearch", {.find_unused_parameters = true}},
    {"OverGloo", {}, "gloo"},
    {"OverlappedOverGloo", {.bucket_cap_mb = 0.05, .overlap = true}, "gloo"},
};

class ReplicateVariants : public ::testing::TestWithParam<std::tuple<Variant, int>> {};
INSTANTIATE_TEST_SUITE_P(OnThreads, ReplicateVariants,
                         ::testing::Combine(::testing::ValuesIn(kVariants),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  std::to_string(std::get<1>(info.param)) + "Ranks";
                         });

TEST_P(ReplicateVariants, AverageGradientsOverSeveralSteps) {
  const auto& [variant, ranks] = GetParam();
  run_threads(ranks,
              [&variant = variant] {
                auto [local, parallel] = twins<Wide>(3);
                replicate(parallel, variant.options);
                for (uint64_t step = 0; step < 4; ++step) {
                  const auto x = rows_of(rank(), {3, 7}, step);
                  local->zero_grad(step % 2 == 0);
                  parallel->zero_grad(step % 2 == 0);
                  local(x).pow(2).sum().backward();
                  parallel(x).pow(2).sum().backward();
                  expect_averages(*parallel, *local);
                }
                EXPECT_EQ(replicate_state(parallel)->engine()->stats().iterations, 4);
              },
              {.backend = variant.backend});
}

TEST_P(ReplicateVariants, AddUpBatchesWithoutSync) {
  const auto& [variant, ranks] = GetParam();
  run_threads(ranks,
              [&variant = variant] {
                auto [local, parallel] = twins<Wide>(4);
                replicate(parallel, variant.options);
                for (int round = 0; round < 2; ++round) {
                  local->zero_grad();
                  parallel->zero_grad();
                  for (uint64_t batch = 0; batch < 3; ++batch) {
                    const auto x = rows_of(rank(), {2, 7}, batch);
                    local(x).sum().backward();
                    std::optional<NoSync> no_sync;
                    if (batch < 2) no_sync.emplace(parallel);
                    parallel(x).sum().backward();
                  }
                  expect_averages(*parallel, *local);
                }
              },
              {.backend = variant.backend});
}

TEST(ReplicateOnThreads, SendsNothingFromARankAlone) {
  for (const char* backend : {"shm", "gloo"}) {
    run_threads(1,
                [] {
                  auto [local, parallel] = twins<Branches>(4);
                  replicate(parallel, {.find_unused_parameters = true});
                  const auto issued = [] {
                    return default_group()->getBackend(at::kCPU)->getSequenceNumberForGroup();
                  };
                  uint64_t before = 0;
                  for (uint64_t step = 0; step < 4; ++step) {
                    const auto x = rows_of(0, {3, 6}, step);
                    local(x, step % 2 == 0).pow(2).sum().backward();
                    parallel(x, step % 2 == 0).pow(2).sum().backward();
                    if (step == 0) before = issued();
                  }
                  EXPECT_EQ(issued(), before);
                  for (const auto& item : parallel->named_parameters()) {
                    const auto expected = local->named_parameters()[item.key()].grad();
                    ASSERT_EQ(item.value().grad().defined(), expected.defined()) << item.key();
                    if (expected.defined()) {
                      EXPECT_TRUE(at::equal(item.value().grad(), expected)) << item.key();
                    }
                  }
                },
                {.backend = backend});
  }
}

TEST(ReplicateOnThreads, TakesRankZerosValues) { run_threads(3, takes_rank_zeros_values); }

TEST(ReplicateOnThreads, RebuildsBucketsInTheOrderOfGradients) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Wide(); });
    replicate(net, {.bucket_cap_mb = 0.0001});
    net(rows_of(rank(), {2, 7})).sum().backward();
    const auto stats = replicate_state(net)->engine()->stats();
    EXPECT_TRUE(stats.buckets_rebuilt);
    EXPECT_THAT(stats.bucket_parameters.front(), ::testing::Contains(HasSubstr("down.")));
    EXPECT_THAT(stats.bucket_parameters.back(), ::testing::Contains(HasSubstr("up.")));
    EXPECT_GT(stats.communication_seconds, 0);
  });
}

TEST(ReplicateOnThreads, FindsUnusedParameters) { run_threads(2, finds_unused_parameters); }

TEST(ReplicateOnThreads, NamesParametersThatGotNoGradient) {
  run_threads(2, [] {
    auto net = seeded(5, [] { return Branches(); });
    replicate(net);
    const auto x = rows_of(rank(), {2, 6});
    net(x, true).sum().backward();
    EXPECT_THAT(message_of<c10::Error>([&] { net(x, true); }),
                AllOf(HasSubstr("'right.weight', 'right.bias', 'spare.weight' and 'spare.bias'"),
                      HasSubstr("find_unused_parameters")));
  });
}

TEST(ReplicateOnThreads, RefusesGradientsWithoutAForward) {
  run_threads(2, [] {
    Net net = seeded(1, [] { return Net(); });
    replicate(net);
    const auto x = rows_of(rank(), {2, 2});
    const auto loss = net(x).sum();
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }),
                AllOf(HasSubstr("'fc"), HasSubstr("no forward through the replicated module")));
    Net other = seeded(1, [] { return Net(); });
    replicate(other);
    other(x);                                                   // builds the engine
    static_cast<NetImpl&>(*other).forward(x).sum().backward();  // counts: a forward is pending
    EXPECT_THAT(
        message_of<c10::Error>([&] { static_cast<NetImpl&>(*other).forward(x).sum().backward(); }),
        HasSubstr("base class"));
  });
}

TEST(ReplicateOnThreads, AveragesPlainModulesAtEveryBackward) {
  run_threads(2, [] {
    auto [local, parallel] = twins<PlainNet>(6);
    replicate(parallel);
    EXPECT_NE(replicate_state(parallel)->engine(), nullptr) << "built at the call";
    for (uint64_t step = 0; step < 3; ++step) {
      const auto x = rows_of(rank(), {2, 5}, step);
      local->zero_grad();
      parallel->zero_grad();
      local(x).sum().backward();
      parallel(x).sum().backward();
      expect_averages(*parallel, *local);
    }
    EXPECT_THAT(message_of<c10::ValueError>([] {
                  PlainNet net;
                  replicate(net, {.find_unused_parameters = true});
                }),
                HasSubstr("TESSERA_MODULE"));
  });
}

TEST(ReplicateOnThreads, AveragesSparseGradients) { run_threads(3, averages_sparse_gradients); }

TEST(ReplicateOnThreads, KeepsDtypesApartAndSharedParametersOnce) {
  struct MixedImpl : torch::nn::Module {
    MixedImpl()
        : a(register_module("a", nn::Linear(4, 4))),
          b(register_module("b", nn::Linear(4, 4))),
          c(register_module("c", nn::Linear(4, 4))) {
      c->to(torch::kDouble);
      b->weight = b->register_parameter("weight2", a->weight);
    }
    at::Tensor forward(const at::Tensor& x) { return c(b(a(x)).to(torch::kDouble)); }
    nn::Linear a, b, c;
  };
  TESSERA_MODULE(Mixed);
  run_threads(2, [] {
    auto [local, parallel] = twins<Mixed>(9);
    replicate(parallel, {.find_unused_parameters = true});
    const auto x = rows_of(rank(), {2, 4});
    local(x).sum().backward();
    parallel(x).sum().backward();
    EXPECT_TRUE(at::allclose(parallel->a->weight.grad(),
                             all_reduce(local->a->weight.grad(), ReduceOp::AVG)));
    EXPECT_TRUE(at::allclose(parallel->c->weight.grad(),
                             all_reduce(local->c->weight.grad(), ReduceOp::AVG)));
    EXPECT_EQ(replicate_state(parallel)->engine()->stats().bucket_bytes.size(), 2U);
  });
}

TEST(ReplicateOnThreads, RunsCommHooks) {
  const auto gradients_with = [](const CommHook& hook) {
    auto net = seeded(3, [] { return Wide(); });
    replicate(net);
    if (hook) register_comm_hook(net, hook);
    net(rows_of(rank(), {3, 7})).pow(2).sum().backward();
    return net->mid->weight.grad().clone();
  };
  run_threads(2, [&] {
    const auto plain = gradients_with({});
    EXPECT_TRUE(at::equal(gradients_with(allreduce_hook), plain));
    auto local = seeded(3, [] { return Wide(); });
    local(rows_of(rank(), {3, 7})).pow(2).sum().backward();
    for (const auto& [hook, dtype] :
         {std::pair<CommHook, c10::ScalarType>(fp16_compress_hook, at::kHalf),
          {bf16_compress_hook, at::kBFloat16}}) {
      const auto compressed = gradients_with(hook);
      EXPECT_FALSE(at::equal(compressed, plain)) << "the hook must have run";
      const auto halves = local->mid->weight.grad().to(dtype).to(at::kFloat);
      const auto mean = all_reduce(halves, ReduceOp::AVG).to(dtype).to(at::kFloat);
      EXPECT_TRUE(at::equal(compressed, mean));
    }
    int calls = 0;
    const auto zero = gradients_with([calls](GradBucket& bucket) mutable {
      EXPECT_EQ(bucket.index(), 0U);
      EXPECT_TRUE(bucket.is_last());
      EXPECT_EQ(bucket.gradients().size(), bucket.parameters().size());
      EXPECT_EQ(++calls, 1);
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(at::zeros_like(bucket.buffer()));
      return future;
    });
    EXPECT_EQ(zero.abs().sum().item<float>(), 0);
  });
}

TEST(ReplicateOnThreads, RefusesHooksThatComeTooLateOrTwice) {
  run_threads(2, [] {
    Net net = seeded(1, [] { return Net(); });
    EXPECT_THAT(message_of<c10::ValueError>([&] { register_comm_hook(net, allreduce_hook); }),
                HasSubstr("call replicate first"));
    replicate(net);
    register_comm_hook(net, allreduce_hook);
    EXPECT_THAT(message_of<c10::Error>([&] { register_comm_hook(net, allreduce_hook); }),
                HasSubstr("already has a comm hook"));
    Net late = seeded(1, [] { return Net(); });
    replicate(late);
    late(rows_of(0, {1, 2})).sum().backward();
    EXPECT_THAT(message_of<c10::Error>([&] { register_comm_hook(late, allreduce_hook); }),
                HasSubstr("before the first backward"));
  });
}

TEST(ReplicateOnThreads, NamesTheFirstParameterThatDiffers) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Wide(7, rank() == 0 ? 20 : 21); });
    replicate(net);
    EXPECT_THAT(message_of<c10::Error>([&] { net(rows_of(0, {1, 7})); }),
                AllOf(HasSubstr("up.weight [20, 7]"), HasSubstr("up.weight [21, 7]")));
  });
}

TEST(ReplicateOnThreads, RefusesWhatMakesNoSense) {
  run_threads(2, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {1, 2}, {"a", "b"});
    Net net = seeded(1, [] { return Net(); });
    EXPECT_THAT(message_of<c10::ValueError>(
                    [&] { replicate(net, {.group = default_group(), .mesh = mesh["b"]}); }),
                HasSubstr("got both"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { replicate(net, {.mesh = mesh}); }),
                HasSubstr("1-D mesh"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { replicate(net, {.bucket_cap_mb = -1}); }),
                HasSubstr("bucket_cap_mb"));
    replicate(net, {.mesh = mesh["b"]});
    EXPECT_THAT(message_of<c10::Error>([&] { replicate(net); }),
                HasSubstr("already has replicate applied"));
    EXPECT_THAT(message_of<c10::Error>([&] { clone_module(net); }), HasSubstr("load_state_dict"));
    Net frozen = seeded(1, [] { return Net(); });
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    replicate(frozen);
    EXPECT_THAT(message_of<c10::ValueError>([&] { frozen(rows_of(0, {1, 2})); }),
                HasSubstr("nothing to average"));
  });
}

TEST(ReplicateOnThreads, WrapsPlainModules) {
  run_threads(2, [] {
    auto [local, inner] = twins<PlainNet>(6);
    inner->register_buffer("seen", torch::full({1}, rank()));
    DistributedDataParallel parallel(inner, {.find_unused_parameters = true});
    EXPECT_EQ(parallel.named_parameters().keys()[0], "module.up.weight");
    for (uint64_t step = 0; step < 3; ++step) {
      const auto x = rows_of(rank(), {2, 5}, step);
      local->zero_grad();
      parallel.zero_grad();
      local(x).sum().backward();
      parallel(x).sum().backward();
      expect_averages(*inner, *local);
    }
    EXPECT_EQ(inner->named_buffers()["seen"].item<int64_t>(), 0) << "buffers follow rank 0";
    EXPECT_EQ(parallel->up->weight.size(0), 15);
    {
      const auto no_sync = parallel.no_sync();
      parallel.zero_grad();
      local->zero_grad();
      const auto x = rows_of(rank(), {2, 5}, 9);
      local(x).sum().backward();
      parallel(x).sum().backward();
      EXPECT_TRUE(at::equal(inner->up->weight.grad(), local->up->weight.grad()));
    }
  });
}

TEST(ReplicateOnThreads, FreesItsStateWithTheModule) {
  run_threads(2, [] {
    std::weak_ptr<ReplicateState> state;
    {
      auto net = seeded(1, [] { return Wide(); });
      replicate(net);
      net(rows_of(rank(), {1, 7})).sum().backward();
      state = replicate_state(net);
    }
    EXPECT_TRUE(state.expired());
  });
}

}  // namespace
}  // namespace tessera::testing
