// Collectives as functions of tensors and their gradients.
#include "comm/collective_bodies.h"
#include "support/ranks.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>

namespace tessera {
namespace {

using collective_bodies::message_of;
using collective_bodies::pattern;
using ::testing::AllOf;
using testing::expect_bitwise_equal;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::run_threads;
using Tensors = std::vector<at::Tensor>;

constexpr int kRanks = 3;

/// Ranks' inputs, the same wherever they are made.
Tensors inputs_of_all(at::IntArrayRef sizes, int ranks = kRanks) {
  const collective_bodies::Setting setting{.backend = "shm", .ranks = ranks};
  return collective_bodies::samples(setting, sizes, at::kDouble, 3);
}

/// What the loss weighs results with: another number for every element and rank.
at::Tensor weights(int of_rank, at::IntArrayRef sizes) {
  const auto count = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return (pattern(of_rank, count, at::kDouble) + 1).view(sizes);
}

/// All ranks' results from all ranks' inputs, on one process.
using Reference = std::function<Tensors(const Tensors&)>;
using Collective = std::function<at::Tensor(const at::Tensor&)>;

/// Values and gradients of `collective` against those of `reference`, where the loss is the sum of
/// all ranks'.
void expect_like_one_process(const Collective& collective, const Reference& reference,
                             at::IntArrayRef sizes) {
  auto all = inputs_of_all(sizes);
  for (auto& input : all) input.set_requires_grad(true);
  const auto expected = reference(all);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (int peer = 0; peer < kRanks; ++peer)
    loss = loss + (expected[peer] * weights(peer, expected[peer].sizes())).sum();
  loss.backward();

  auto own = all[rank()].detach().clone().set_requires_grad(true);
  const auto result = collective(own);
  expect_equal(result.detach(), expected[rank()].detach(), "value");
  expect_bitwise_equal(own.detach(), all[rank()].detach(), "the argument");
  EXPECT_TRUE(result.requires_grad());
  (result * weights(rank(), result.sizes())).sum().backward();
  ASSERT_TRUE(own.grad().defined());
  const auto gradient = all[rank()].grad();
  expect_equal(own.grad(), gradient.defined() ? gradient : at::zeros_like(own), "gradient");

  // Without gradients the same function gives the same value.
  EXPECT_FALSE(collective(all[rank()].detach()).requires_grad());
}

void run(const testing::RankBody& body, const char* backend = "shm") {
  run_threads(kRanks, body, {.backend = backend, .timeout = std::chrono::seconds(20)});
}

class FunctionalOnThreads : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Backends, FunctionalOnThreads, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(FunctionalOnThreads, AllReduceSumsAndAverages) {
  run(
      [] {
        const auto sum = [](const Tensors& all) { return at::stack(all).sum(0); };
        expect_like_one_process([](const auto& x) { return all_reduce(x); },
                                [&](const Tensors& all) { return Tensors(kRanks, sum(all)); },
                                {4, 3});
        expect_like_one_process(
            [](const auto& x) { return all_reduce(x, ReduceOp::AVG); },
            [&](const Tensors& all) { return Tensors(kRanks, sum(all) / kRanks); }, {5});
        expect_like_one_process([](const auto& x) { return all_reduce(x); },
                                [&](const Tensors& all) { return Tensors(kRanks, sum(all)); }, {});
      },
      GetParam());
}

TEST_P(FunctionalOnThreads, AllReduceGivesTheExtremeItsGradient) {
  run(
      [] {
        expect_like_one_process(
            [](const auto& x) { return all_reduce(x, ReduceOp::MAX); },
            [](const Tensors& all) { return Tensors(kRanks, at::stack(all).amax(0)); }, {4, 3});
        expect_like_one_process(
            [](const auto& x) { return all_reduce(x, ReduceOp::MIN); },
            [](const Tensors& all) { return Tensors(kRanks, at::stack(all).amin(0)); }, {4, 3});
      },
      GetParam());
}

TEST_P(FunctionalOnThreads, RanksThatTieShareTheGradient) {
  run(
      [] {
        // Ranks 0 and 1 hold the largest value of the first element, all that of the second.
        auto own = at::tensor({rank() == 2 ? 1.0 : 5.0, 2.0}).set_requires_grad(true);
        all_reduce(own, ReduceOp::MAX).sum().backward();  // the gradient of the result is 3 in all
        expect_equal(own.grad(), at::tensor({rank() == 2 ? 0.0 : 1.5, 1.0}).to(own.grad().dtype()));
      },
      GetParam());
}

TEST_P(FunctionalOnThreads, AllGatherJoinsAlongAnyDimension) {
  run(
      [] {
        for (const int64_t dim : {0, 1, 2, -1, -3}) {
          expect_like_one_process(
              [=](const auto& x) { return all_gather(x, dim); },
              [=](const Tensors& all) { return Tensors(kRanks, at::cat(all, dim)); }, {2, 3, 4});
        }
      },
      GetParam());
}

TEST_P(FunctionalOnThreads, ReduceScatterCutsAlongAnyDimension) {
  run(
      [] {
        for (const int64_t dim : {0, 1, 2, -1}) {
          for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
            expect_like_one_process(
                [=](const auto& x) { return reduce_scatter(x, dim, op); },
                [=](const Tensors& all) {
                  const auto sum = at::stack(all).sum(0);
                  return (op == ReduceOp::AVG ? sum / kRanks : sum).chunk(kRanks, dim);
                },
                {6, 3, 9});
          }
        }
      },
      GetParam());
}

TEST_P(FunctionalOnThreads, AllToAllExchangesRows) {
  run(
      [] {
        expect_like_one_process([](const auto& x) { return all_to_all(x); },
                                [](const Tensors& all) {
                                  Tensors results;
                                  for (int to = 0; to < kRanks; ++to) {
                                    Tensors parts;
                                    for (const auto& from : all)
                                      parts.push_back(from.chunk(kRanks)[to]);
                                    results.push_back(at::cat(parts));
                                  }
                                  return results;
                                },
                                {6, 2});
        // Rank r sends r rows to rank 0, none to rank 1 and 4 - r to rank 2.
        const auto sent = [](int from) { return std::vector<int64_t>{from, 0, 4 - from}; };
        const std::vector<std::vector<int64_t>> received = {{0, 1, 2}, {0, 0, 0}, {4, 3, 2}};
        expect_like_one_process(
            [=](const auto& x) { return all_to_all(x, received[rank()], sent(rank())); },
            [=](const Tensors& all) {
              Tensors results;
              for (int to = 0; to < kRanks; ++to) {
                Tensors parts;
                for (int from = 0; from < kRanks; ++from)
                  parts.push_back(all[from].split_with_sizes(sent(from))[to]);
                results.push_back(at::cat(parts));
              }
              return results;
            },
            {4, 2});
      },
      GetParam());
}

TEST_P(FunctionalOnThreads, BroadcastGivesTheSourceAllGradients) {
  run(
      [] {
        for (int source = 0; source < kRanks; ++source) {
          expect_like_one_process([=](const auto& x) { return broadcast(x, source); },
                                  [=](const Tensors& all) { return Tensors(kRanks, all[source]); },
                                  {2, 3});
        }
      },
      GetParam());
}

TEST_P(FunctionalOnThreads, WorkOnSubGroups) {
  run(
      [] {
        if (rank() == 1) return barrier();
        const auto group = new_group({2, 0});
        auto own = at::full({2}, rank() + 1.0).set_requires_grad(true);
        const auto sum = all_reduce(own, ReduceOp::SUM, group);
        EXPECT_TRUE(sum.detach().eq(4).all().item<bool>());
        (sum * (rank() + 1)).sum().backward();
        EXPECT_TRUE(own.grad().eq(4).all().item<bool>()) << own.grad();
        EXPECT_TRUE(all_gather(own.detach(), 0, group).equal(at::tensor({3, 3, 1, 1}, at::kFloat)));
        barrier();
      },
      GetParam());
}

TEST_P(FunctionalOnThreads, TakeViewsAndKeepThemApart) {
  run(
      [] {
        const auto base = pattern(rank(), 24).view({4, 6});
        const auto before = base.clone();
        const auto sum = all_reduce(base.t());
        EXPECT_EQ(sum.sizes(), at::IntArrayRef({6, 4}));
        const auto whole = all_gather(base.slice(1, 0, 6, 2), 1);
        EXPECT_EQ(whole.sizes(), at::IntArrayRef({4, 9}));
        for (int peer = 0; peer < kRanks; ++peer) {
          const auto theirs = pattern(peer, 24).view({4, 6}).slice(1, 0, 6, 2);
          expect_bitwise_equal(whole.narrow(1, 3 * peer, 3).contiguous(), theirs.contiguous());
        }
        sum.zero_();
        expect_bitwise_equal(base, before, "the argument");
      },
      GetParam());
}

TEST(FunctionalErrorOnThreads, NamesWhatCanNotBeDifferentiated) {
  run([] {
    auto own = at::ones({3}).set_requires_grad(true);
    const auto product = all_reduce(own * 2, ReduceOp::PRODUCT).sum();
    EXPECT_EQ(product.item<float>(), 24);
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] { product.backward(); }),
                AllOf(HasSubstr("product is not differentiable"), HasSubstr("sum")));
    const auto largest = reduce_scatter(own, 0, ReduceOp::MAX).sum();
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] { largest.backward(); }),
                HasSubstr("max is not differentiable"));
  });
}

TEST(FunctionalErrorOnThreads, SaysWhichShapesItTakes) {
  run([] {
    const auto rows = at::ones({4, 3});
    EXPECT_THAT(message_of<c10::ValueError>([&] { reduce_scatter(rows); }),
                AllOf(HasSubstr("divisible by 3"), HasSubstr("[4, 3]")));
    EXPECT_THAT(message_of<c10::ValueError>([&] { reduce_scatter(rows, 2); }),
                HasSubstr("from -2 to 1, got 2"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { all_gather(rows, -3); }), HasSubstr("got -3"));
    EXPECT_THAT(message_of<c10::ValueError>([] { all_gather(at::ones({})); }),
                HasSubstr("at least one dimension"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { all_to_all(rows); }), HasSubstr("divisible"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { all_to_all(rows, {1, 3}, {2, 2}); }),
                HasSubstr("splits, one per rank, got 2"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { broadcast(rows, 3); }),
                HasSubstr("from 0 to 2, got 3"));
    EXPECT_THAT(message_of<c10::TypeError>([&] { all_reduce(rows, ReduceOp::BAND); }),
                HasSubstr("has no meaning"));
  });
}

thread_local std::vector<std::string>* seen_operators = nullptr;

TEST(FunctionalShmOnThreads, IsSeenByWhateverRecordsTheDispatcher) {
  run([] {
    std::vector<std::string> names;
    seen_operators = &names;
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          seen_operators->emplace_back(function.name());
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
    auto own = at::ones({3}).set_requires_grad(true);
    all_reduce(own);
    all_gather(own);
    reduce_scatter(own);
    all_to_all(own);
    broadcast(own);
    at::removeCallback(handle);
    for (const auto* name : {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor",
                             "all_to_all_single", "broadcast", "wait_tensor"}) {
      EXPECT_THAT(names, ::testing::Contains(std::string("_c10d_functional::") + name));
    }
  });
}

TEST(FunctionalShmOnThreads, LeavesNothingInTheWayOfSecondUse) {
  run([] {
    // The same input twice in one graph, as tied weights are.
    auto own = at::ones({3}).set_requires_grad(true);
    const auto sum = all_reduce(own);
    (sum + all_reduce(own * 2)).sum().backward();
    EXPECT_TRUE(own.grad().eq(9).all().item<bool>()) << own.grad();
    // A leaf that is handed on without a copy must not receive later writes.
    const auto same = all_reduce(own.detach(), ReduceOp::MAX);
    same.add_(1);
    EXPECT_TRUE(own.detach().eq(1).all().item<bool>());
  });
}

}  // namespace
}  // namespace tessera
