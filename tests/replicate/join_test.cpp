// Ranks with different numbers of batches.
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "replicate/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Counts = std::vector<int>;  // batches, by rank

at::Tensor batch_of(int rank, int step, int64_t width) {
  auto generator = at::detail::createCPUGenerator(1000 * rank + step);
  return at::randn({3, width}, generator);
}

template <class M>
void descend(M& net) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad().to_dense(), 0.05);
  }
  net->zero_grad();
}

using Loss = std::function<at::Tensor(int rank, int step)>;

/// One process, all ranks' batches: gradients add up and are divided as the option says.
template <class M>
void train_alone(M& net, const Counts& counts, bool by_initial, const Loss& loss) {
  const int ranks = static_cast<int>(counts.size());
  for (int step = 0; step < *std::max_element(counts.begin(), counts.end()); ++step) {
    const auto active =
        std::count_if(counts.begin(), counts.end(), [&](int count) { return step < count; });
    for (int rank = 0; rank < ranks; ++rank) {
      if (step >= counts[rank]) continue;
      (loss(rank, step) / static_cast<double>(by_initial ? ranks : active)).backward();
    }
    descend(net);
  }
}

template <class M>
void train_joined(M& net, const Counts& counts, JoinOptions options, const Loss& loss) {
  Join join(net, options);
  for (int step = 0; step < counts[rank()]; ++step) {
    loss(rank(), step).backward();
    descend(net);
  }
}

void expect_same_parameters(const torch::nn::Module& actual, const torch::nn::Module& expected) {
  const auto parameters = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    EXPECT_TRUE(at::allclose(item.value(), parameters[item.key()], 1e-4, 1e-5))
        << item.key() << " on rank " << rank();
    const auto all = all_gather(item.value().detach().unsqueeze(0), 0);
    for (int other = 1; other < world_size(); ++other) EXPECT_TRUE(at::equal(all[other], all[0]));
  }
}

struct JoinVariant {
  const char* name;
  ReplicateOptions options;
  JoinOptions join = {};
  CommHook hook = {};
  std::string backend = "shm";
};
const JoinVariant kJoinVariants[] = {
    {"Defaults", {}},
    {"SmallBuckets", {.bucket_cap_mb = 0.001, .overlap = true}},
    {"Views", {.bucket_cap_mb = 0.05, .gradient_as_bucket_view = true}},
    {"UnusedSearch", {.find_unused_parameters = true}},
    {"StaticGraph", {.static_graph = true}},
    {"CommHook", {.bucket_cap_mb = 0.05}, {}, allreduce_hook},
    {"DividedByTheActive", {.bucket_cap_mb = 0.05}, {.divide_by_initial_world_size = false}},
    {"DividedByTheActiveInViews",
     {.gradient_as_bucket_view = true},
     {.divide_by_initial_world_size = false}},
    {"OverGloo", {.bucket_cap_mb = 0.05}, {}, {}, "gloo"},
};
const Counts kCounts[] = {{3, 1}, {0, 2}, {2, 0}, {2, 2}, {1, 3, 0}, {0, 0, 2}, {2, 4, 3}, {0, 0}};

class JoinVariants : public ::testing::TestWithParam<JoinVariant> {};
INSTANTIATE_TEST_SUITE_P(OnThreads, JoinVariants, ::testing::ValuesIn(kJoinVariants),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(JoinVariants, TrainLikeOneProcess) {
  const auto& variant = GetParam();
  for (const auto& counts : kCounts) {
    run_threads(
        static_cast<int>(counts.size()),
        [&] {
          auto [alone, joined] = twins<Wide>(3);
          replicate(joined, variant.options);
          if (variant.hook) register_comm_hook(joined, variant.hook);
          const auto loss_of = [](Wide& net) {
            return
                [&net](int rank, int step) { return net(batch_of(rank, step, 7)).pow(2).mean(); };
          };
          // In the second epoch the ranks change places.
          auto changed = counts;
          std::reverse(changed.begin(), changed.end());
          for (const auto& epoch : {counts, changed}) {
            train_alone(alone, epoch, variant.join.divide_by_initial_world_size, loss_of(alone));
            train_joined(joined, epoch, variant.join, loss_of(joined));
            expect_same_parameters(*joined, *alone);
          }
        },
        {.backend = variant.backend});
  }
}

TEST(JoinOnThreads, ServesPlainModules) {
  for (const Counts& counts : {Counts{3, 1}, Counts{0, 2, 1}}) {
    run_threads(static_cast<int>(counts.size()), [&] {
      auto [alone, joined] = twins<PlainNet>(3);
      replicate(joined);
      const auto loss_of = [](PlainNet& net) {
        return [&net](int rank, int step) { return net(batch_of(rank, step, 5)).pow(2).mean(); };
      };
      train_alone(alone, counts, true, loss_of(alone));
      train_joined(joined, counts, {}, loss_of(joined));
      expect_same_parameters(*joined, *alone);
    });
  }
}

TEST(JoinOnThreads, ServesParametersThatSomeRanksDoNotUse) {
  run_threads(3, [] {
    const Counts counts = {1, 3, 2};
    auto [alone, joined] = twins<Branches>(3);
    replicate(joined, {.find_unused_parameters = true});
    const auto loss_of = [](Branches& net) {
      return [&net](int rank, int step) {
        return net(batch_of(rank, step, 6), rank == 1).pow(2).mean();
      };
    };
    train_alone(alone, counts, true, loss_of(alone));
    train_joined(joined, counts, {}, loss_of(joined));
    expect_same_parameters(*joined, *alone);
  });
}

TEST(JoinOnThreads, ServesSparseGradientsAndAccumulation) {
  for (const bool by_initial : {true, false}) {
    run_threads(2, [by_initial] {
      const Counts counts = {3, 1};
      auto [alone, joined] = twins<Words>(8);
      replicate(joined);
      const auto loss_of = [](Words& net) {
        return [&net](int rank, int step) {
          std::optional<NoSync> no_sync;
          if (replicate_state(net)) no_sync.emplace(net);
          const auto first = net(at::arange(rank, rank + 2)).pow(2).sum();
          first.backward();  // adds up; nothing is sent
          no_sync.reset();
          return net(at::arange(step, step + 3)).pow(2).sum();
        };
      };
      // Alone, the first half has to be divided like the rest.
      const auto loss_alone = [&](int rank, int step) {
        return alone(at::arange(rank, rank + 2)).pow(2).sum() +
               alone(at::arange(step, step + 3)).pow(2).sum();
      };
      train_alone(alone, counts, by_initial, loss_alone);
      train_joined(joined, counts, {.divide_by_initial_world_size = by_initial}, loss_of(joined));
      expect_same_parameters(*joined, *alone);
    });
  }
}

TEST(JoinOnThreads, FollowsSeveralModulesInAnyOrder) {
  for (const Counts& counts : {Counts{3, 1}, Counts{0, 2, 1}}) {
    run_threads(static_cast<int>(counts.size()), [&] {
      auto [first_alone, first] = twins<Wide>(3);
      auto [second_alone, second] = twins<Wide>(4);
      for (auto* net : {&first, &second}) replicate(*net, {.bucket_cap_mb = 0.001});
      // One backward through both; every other step the second one alone, before it.
      const auto loss_of = [](Wide& a, Wide& b) {
        return [&](int rank, int step) {
          const auto x = batch_of(rank, step, 7);
          return step % 2 == 0 ? b(a(x)).pow(2).mean() : a(b(x)).pow(2).mean();
        };
      };
      torch::nn::ModuleList both_alone(first_alone.ptr(), second_alone.ptr());
      torch::nn::ModuleList both(first.ptr(), second.ptr());
      train_alone(both_alone, counts, true, loss_of(first_alone, second_alone));
      {
        Join join({first, second});
        const auto loss = loss_of(first, second);
        for (int step = 0; step < counts[rank()]; ++step) {
          loss(rank(), step).backward();
          descend(both);
        }
        join.finish();
        expect_same_parameters(*both, *both_alone);
      }
    });
  }
}

TEST(JoinOnThreads, BuffersFollowTheLowestRankWithBatches) {
  struct CountsImpl : torch::nn::Module {
    CountsImpl() : line(register_module("line", torch::nn::Linear(2, 2))) {
      seen = register_buffer("seen", torch::zeros({1}));
    }
    at::Tensor forward(const at::Tensor& x) {
      seen += 1 + 10 * rank();
      return line(x);
    }
    torch::nn::Linear line;
    at::Tensor seen;
  };
  TORCH_MODULE(Counts);
  run_threads(3, [] {
    Counts net = seeded(1, [] { return Counts(); });
    DistributedDataParallel parallel(net);
    const int batches[] = {1, 3, 2};
    {
      const auto join = parallel.join();
      for (int step = 0; step < batches[rank()]; ++step) {
        parallel(torch::ones({1, 2})).sum().backward();
        // Step 0 starts from rank 0's value, the others from rank 1's.
        const double expected[] = {0, 11, 22};
        EXPECT_EQ(net->seen.item<double>(), expected[step] + 1 + 10 * rank()) << step;
        parallel.zero_grad();
      }
    }
    EXPECT_EQ(net->seen.item<double>(), 22 + 11) << "the last rank's";
  });
}

TEST(JoinOnThreads, EarlyTerminationThrowsOnAllRanks) {
  for (const bool is_plain : {false, true}) {
    run_threads(3, [is_plain] {
      auto hookable = seeded(3, [] { return Net(); });
      auto plain = seeded(3, [] { return PlainNet(2); });
      if (is_plain)
        replicate(plain);
      else
        replicate(hookable);
      const auto step = [&] {
        const auto x = batch_of(rank(), 0, 2);
        (is_plain ? plain(x) : hookable(x)).sum().backward();
      };
      const auto& parameter = is_plain ? plain->up->weight : hookable->fc1->weight;
      const int batches[] = {3, 1, 2};
      int done = 0;
      const auto train = [&] {
        const Join join(is_plain ? static_cast<torch::nn::Module&>(*plain) : *hookable,
                        {.throw_on_early_termination = true});
        for (; done < batches[rank()]; ++done) step();
      };
      EXPECT_THAT(message_of<c10::Error>(train),
                  AllOf(HasSubstr("rank 1 has no batches left"), HasSubstr("rank 0 has")));
      EXPECT_EQ(done, 1);
      // Nothing is left behind.
      parameter.mutable_grad().reset();
      step();
      const auto all = all_gather(parameter.grad().unsqueeze(0), 0);
      for (int other = 1; other < 3; ++other) EXPECT_TRUE(at::equal(all[other], all[0]));
    });
  }
}

TEST(JoinOnThreads, EvenCountsAreNoEarlyTermination) {
  run_threads(2, [] {
    auto [alone, joined] = twins<Wide>(3);
    replicate(joined);
    const auto loss_of = [](Wide& net) {
      return [&net](int rank, int step) { return net(batch_of(rank, step, 7)).pow(2).mean(); };
    };
    train_alone(alone, {2, 2}, true, loss_of(alone));
    train_joined(joined, {2, 2}, {.throw_on_early_termination = true}, loss_of(joined));
    expect_same_parameters(*joined, *alone);
  });
}

TEST(JoinOnThreads, AnExceptionOfOneRankEndsTheOthers) {
  run_threads(3, [] {
    auto net = seeded(3, [] { return Net(); });
    replicate(net);
    const auto train = [&] {
      const Join join(net);
      // Rank 2 has run out when rank 1 fails.
      for (int step = 0; step < (rank() == 2 ? 1 : 4); ++step) {
        TORCH_CHECK(rank() != 1 || step < 2, "out of luck");
        net(batch_of(rank(), step, 2)).sum().backward();
      }
    };
    EXPECT_THAT(message_of<c10::Error>(train),
                HasSubstr(rank() == 1 ? "out of luck" : "rank 1 of the group has left it"));
    Join again(net);
    net(batch_of(rank(), 9, 2)).sum().backward();
  });
}

TEST(JoinOnThreads, DisagreementIsAnErrorOnAllRanks) {
  run_threads(3, [] {
    auto first = seeded(3, [] { return Net(); });
    auto second = seeded(3, [] { return PlainNet(2); });
    replicate(first);
    replicate(second);
    const auto train = [&] {
      const Join join({first, second});
      const auto x = batch_of(rank(), 0, 2);
      if (rank() == 0) first(x).sum().backward();
      if (rank() == 1) second(x).sum().backward();
    };
    EXPECT_THAT(message_of<c10::Error>(train),
                AllOf(HasSubstr("rank 0 sends bucket 0 of tessera::testing::NetImpl"),
                      HasSubstr("rank 1 sends bucket 0 of tessera::testing::PlainNetImpl")));
  });
}

TEST(JoinOnThreads, RefusesWhatItCanNotServe) {
  run_threads(2, [] {
    auto net = seeded(3, [] { return Net(); });
    EXPECT_THAT(message_of<c10::ValueError>([&] { const Join join(net); }),
                HasSubstr("call replicate first"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { const Join join(std::vector<nn::ModuleRef>{}); }),
                HasSubstr("at least one module"));
    replicate(net);
    {
      const Join join(net);
      EXPECT_THAT(message_of<c10::Error>([&] { const Join inner(net); }),
                  HasSubstr("inside another Join"));
    }
    auto own = seeded(3, [] { return Net(); });
    replicate(own, {.group = new_group({rank()})});
    EXPECT_THAT(message_of<c10::ValueError>([&] { const Join join({net, own}); }),
                HasSubstr("over the same ranks"));
  });
}

TEST(JoinOfProcesses, ServesARankWithoutBatches) {
  run_processes(2, [] {
    auto net = seeded(3, [] { return Net(); });
    replicate(net);
    if (rank() == 1) {
      const Join join(net);
      for (int step = 0; step < 3; ++step) net(batch_of(1, step, 2)).sum().backward();
    } else {
      const Join join(net);
    }
    const auto all = all_gather(net->fc1->weight.detach().unsqueeze(0), 0);
    EXPECT_TRUE(at::equal(all[0], all[1]));
  });
}

}  // namespace
}  // namespace tessera::testing
