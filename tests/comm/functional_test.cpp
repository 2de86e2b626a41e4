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

/// Ranks' inputs, the same wherever they are made.
Tensors inputs_of_all(at::IntArrayRef sizes) {
  const collective_bodies::Setting setting{
      .backend = "shm", .ranks = world_size(), .device = testing::run_device()};
  return collective_bodies::samples(setting, sizes, at::kDouble, 3);
}

/// What the loss weighs results with: another number for every element and rank.
at::Tensor weights(int of_rank, at::IntArrayRef sizes) {
  const auto count = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return (pattern(of_rank, count, at::kDouble) + 1).view(sizes).to(testing::run_device());
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
  at::Tensor loss = at::zeros({}, all[0].options());
  for (int peer = 0; peer < world_size(); ++peer)
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

constexpr std::chrono::seconds kTimeout{20};

void run(const testing::RankBody& body) {
  run_threads(3, body, {.backend = "shm", .timeout = kTimeout});
}

class Functional : public ::testing::TestWithParam<testing::DeviceCase> {
 protected:
  static void run(const testing::RankBody& body) {
    const auto& where = GetParam();
    if (where.device == at::kCPU)
      return run_threads(where.ranks, body, {.backend = where.backend, .timeout = kTimeout});
    testing::run_on(where, body, {.timeout = kTimeout});
  }
};
INSTANTIATE_TEST_SUITE_P(OnThreads, Functional,
                         ::testing::ValuesIn(testing::device_cases(at::kCPU, {"shm", "gloo"}, {3})),
                         testing::case_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, Functional,
                         ::testing::ValuesIn(testing::cuda_cases({"nccl", "shm", "gloo"})),
                         testing::case_name);

TEST_P(Functional, AllReduceSumsAndAverages) {
  run([] {
    const auto sum = [](const Tensors& all) { return at::stack(all).sum(0); };
    expect_like_one_process([](const auto& x) { return all_reduce(x); },
                            [&](const Tensors& all) { return Tensors(world_size(), sum(all)); },
                            {4, 3});
    expect_like_one_process(
        [](const auto& x) { return all_reduce(x, ReduceOp::AVG); },
        [&](const Tensors& all) { return Tensors(world_size(), sum(all) / world_size()); }, {5});
    expect_like_one_process([](const auto& x) { return all_reduce(x); },
                            [&](const Tensors& all) { return Tensors(world_size(), sum(all)); },
                            {});
  });
}

TEST_P(Functional, AllReduceGivesTheExtremeItsGradient) {
  run([] {
    expect_like_one_process(
        [](const auto& x) { return all_reduce(x, ReduceOp::MAX); },
        [](const Tensors& all) { return Tensors(world_size(), at::stack(all).amax(0)); }, {4, 3});
    expect_like_one_process(
        [](const auto& x) { return all_reduce(x, ReduceOp::MIN); },
        [](const Tensors& all) { return Tensors(world_size(), at::stack(all).amin(0)); }, {4, 3});
  });
}

TEST_P(Functional, RanksThatTieShareTheGradient) {
  run([] {
    // All but the last rank hold the largest value of the first element, all that of the
    // second.
    const bool is_last = rank() == world_size() - 1;
    auto own = at::tensor({is_last ? 1.0 : 5.0, 2.0}).to(testing::run_device());
    own.set_requires_grad(true);
    all_reduce(own, ReduceOp::MAX).sum().backward();  // 1 for every rank's result
    const double share = world_size() / (world_size() - 1.0);
    expect_equal(own.grad(), at::tensor({is_last ? 0.0 : share, 1.0}).to(own.grad().scalar_type()));
  });
}

TEST_P(Functional, AllGatherJoinsAlongAnyDimension) {
  run([] {
    for (const int64_t dim : {0, 1, 2, -1, -3}) {
      expect_like_one_process(
          [=](const auto& x) { return all_gather(x, dim); },
          [=](const Tensors& all) { return Tensors(world_size(), at::cat(all, dim)); }, {2, 3, 4});
    }
  });
}

TEST_P(Functional, ReduceScatterCutsAlongAnyDimension) {
  run([] {
    for (const int64_t dim : {0, 1, 2, -1}) {
      for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
        expect_like_one_process(
            [=](const auto& x) { return reduce_scatter(x, dim, op); },
            [=](const Tensors& all) {
              const auto sum = at::stack(all).sum(0);
              return (op == ReduceOp::AVG ? sum / world_size() : sum).chunk(world_size(), dim);
            },
            {12, 24, 12});
      }
    }
  });
}

TEST_P(Functional, AllToAllExchangesRows) {
  run([] {
    expect_like_one_process([](const auto& x) { return all_to_all(x); },
                            [](const Tensors& all) {
                              Tensors results;
                              for (int to = 0; to < world_size(); ++to) {
                                Tensors parts;
                                for (const auto& from : all)
                                  parts.push_back(from.chunk(world_size())[to]);
                                results.push_back(at::cat(parts));
                              }
                              return results;
                            },
                            {12, 2});
    // Rank r sends r rows to rank 0, 4 - r to the last one and none to the others.
    const auto sent = [](int from) {
      std::vector<int64_t> rows(world_size(), 0);
      rows.front() = from;
      rows.back() = 4 - from;
      return rows;
    };
    std::vector<int64_t> received;
    for (int from = 0; from < world_size(); ++from) received.push_back(sent(from)[rank()]);
    expect_like_one_process([=](const auto& x) { return all_to_all(x, received, sent(rank())); },
                            [=](const Tensors& all) {
                              Tensors results;
                              for (int to = 0; to < world_size(); ++to) {
                                Tensors parts;
                                for (int from = 0; from < world_size(); ++from)
                                  parts.push_back(all[from].split_with_sizes(sent(from))[to]);
                                results.push_back(at::cat(parts));
                              }
                              return results;
                            },
                            {4, 2});
  });
}

TEST_P(Functional, BroadcastGivesTheSourceAllGradients) {
  run([] {
    for (int source = 0; source < world_size(); ++source) {
      expect_like_one_process(
          [=](const auto& x) { return broadcast(x, source); },
          [=](const Tensors& all) { return Tensors(world_size(), all[source]); }, {2, 3});
    }
  });
}

TEST_P(Functional, WorkOnSubGroups) {
  run([] {
    const int last = world_size() - 1;
    if (rank() != 0 && rank() != last) return barrier();
    const auto group = new_group({last, 0});
    auto own = at::full({2}, rank() + 1.0, testing::run_device()).set_requires_grad(true);
    const auto sum = all_reduce(own, ReduceOp::SUM, group);
    EXPECT_TRUE(sum.detach().eq(last + 2).all().item<bool>());
    (sum * (rank() + 1)).sum().backward();
    EXPECT_TRUE(own.grad().eq(last + 2).all().item<bool>()) << own.grad();
    expect_bitwise_equal(all_gather(own.detach(), 0, group),
                         at::tensor({last + 1, last + 1, 1, 1}, at::kFloat));
    barrier();
  });
}

TEST_P(Functional, TakeViewsAndKeepThemApart) {
  run([] {
    const auto base = pattern(rank(), 24).view({4, 6}).to(testing::run_device());
    const auto before = base.clone();
    const auto sum = all_reduce(base.t());
    EXPECT_EQ(sum.sizes(), at::IntArrayRef({6, 4}));
    const auto whole = all_gather(base.slice(1, 0, 6, 2), 1);
    EXPECT_EQ(whole.sizes(), at::IntArrayRef({4, 3 * world_size()}));
    for (int peer = 0; peer < world_size(); ++peer) {
      const auto theirs = pattern(peer, 24).view({4, 6}).slice(1, 0, 6, 2);
      expect_bitwise_equal(whole.narrow(1, 3 * peer, 3).contiguous(), theirs.contiguous());
    }
    sum.zero_();
    expect_bitwise_equal(base, before, "the argument");
  });
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
