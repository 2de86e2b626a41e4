#include "comm/collective_cases.h"
#include "comm/errors_of_calls.h"
#include "support/beacon.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

#include <functional>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using shm::call_all_reduce;
using shm::kLarge;
using shm::kSmall;
using shm::sample;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::RankKind;

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Call = std::function<WorkPtr(c10d::ProcessGroup&)>;

at::TensorOptions on(at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions(testing::run_device()).dtype(dtype);
}

Call all_reduce_of(int64_t count, at::ScalarType dtype = at::kFloat, ReduceOp op = ReduceOp::SUM) {
  return [=](c10d::ProcessGroup& group) {
    Tensors tensors{at::ones({count}, on(dtype))};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    return group.allreduce(tensors, options);
  };
}
Call broadcast_from(int root, int64_t count = kSmall) {
  return [=](c10d::ProcessGroup& group) {
    Tensors tensors{at::ones({count}, on())};
    return group.broadcast(tensors, {.rootRank = root});
  };
}
Call reduce_to(int root) {
  return [=](c10d::ProcessGroup& group) {
    Tensors tensors{at::ones({kSmall}, on())};
    c10d::ReduceOptions options;
    options.rootRank = root;
    return group.reduce(tensors, options);
  };
}
Call all_gather_of(int64_t own, const std::vector<int64_t>& counts) {
  return [=](c10d::ProcessGroup& group) {
    Tensors inputs{at::ones({own}, on())};
    std::vector<Tensors> outputs(1);
    for (const auto count : counts) outputs[0].push_back(at::zeros({count}, on()));
    return group.allgather(outputs, inputs);
  };
}
Call gather_to_0(int64_t count) {
  return [=](c10d::ProcessGroup& group) {
    Tensors inputs{at::ones({count}, on())};
    std::vector<Tensors> outputs;
    if (group.getRank() == 0) outputs = {{at::zeros({count}, on()), at::zeros({count}, on())}};
    return group.gather(outputs, inputs);
  };
}
Call scatter_from_0(int64_t count) {
  return [=](c10d::ProcessGroup& group) {
    Tensors outputs{at::zeros({count}, on())};
    std::vector<Tensors> inputs;
    if (group.getRank() == 0) inputs = {{at::ones({count}, on()), at::ones({count}, on())}};
    return group.scatter(outputs, inputs);
  };
}
Call reduce_scatter_of(int64_t count) {
  return [=](c10d::ProcessGroup& group) {
    auto input = at::ones({2 * count}, on());
    auto output = at::zeros({count}, on());
    return group.getBackend(testing::run_device().type())->_reduce_scatter_base(output, input, {});
  };
}
Call all_to_all_of(std::vector<int64_t> sent, std::vector<int64_t> received) {
  return [=](c10d::ProcessGroup& group) mutable {
    auto input = at::ones({sent[0] + sent[1]}, on());
    auto output = at::zeros({received[0] + received[1]}, on());
    return group.getBackend(testing::run_device().type())
        ->alltoall_base(output, input, received, sent, {});
  };
}
Call barrier_call() {
  return [](c10d::ProcessGroup& group) { return group.barrier(); };
}
Call send_of(int64_t count, at::ScalarType dtype = at::kFloat) {
  return [=](c10d::ProcessGroup& group) {
    Tensors tensors{at::ones({count}, on(dtype))};
    return group.send(tensors, 1, 0);
  };
}
Call receive_of(int64_t count) {
  return [=](c10d::ProcessGroup& group) {
    Tensors tensors{at::zeros({count}, on())};
    return group.recv(tensors, 0, 0);
  };
}

/// What rank 0 and rank 1 call, and both sides as the error shows them.
struct Disagreement {
  std::string name;
  std::vector<Call> calls;
  std::vector<std::string> texts;
};

std::vector<Disagreement> disagreements() {
  return {
      {"another collective",
       {all_reduce_of(4), broadcast_from(0, 4)},
       {"all_reduce #2 (4 float32, 16 B, sum)", "broadcast #2 (4 float32, 16 B, root 0)"}},
      {"a barrier against data",
       {barrier_call(), all_reduce_of(4)},
       {"barrier #2", "all_reduce #2 (4 float32, 16 B, sum)"}},
      {"another dtype of the same size",
       {all_reduce_of(4), all_reduce_of(4, at::kInt)},
       {"all_reduce #2 (4 float32, 16 B, sum)", "all_reduce #2 (4 int32, 16 B, sum)"}},
      {"another size",
       {all_reduce_of(4), all_reduce_of(5)},
       {"all_reduce #2 (4 float32, 16 B, sum)", "all_reduce #2 (5 float32, 20 B, sum)"}},
      {"large against small",
       {all_reduce_of(4), all_reduce_of(kLarge)},
       {"all_reduce #2 (4 float32, 16 B, sum)", "all_reduce #2 (262144 float32, 1 MiB, sum)"}},
      {"empty against something",
       {all_reduce_of(0), all_reduce_of(4)},
       {"all_reduce #2 (0 float32, 0 B, sum)", "all_reduce #2 (4 float32, 16 B, sum)"}},
      {"another operation",
       {all_reduce_of(4), all_reduce_of(4, at::kFloat, ReduceOp::MAX)},
       {"all_reduce #2 (4 float32, 16 B, sum)", "all_reduce #2 (4 float32, 16 B, max)"}},
      {"another root of a broadcast",
       {broadcast_from(0), broadcast_from(1)},
       {"broadcast #2 (100 float32, 400 B, root 0)", "broadcast #2 (100 float32, 400 B, root 1)"}},
      {"another root of a large broadcast",
       {broadcast_from(0, kLarge), broadcast_from(1, kLarge)},
       {"broadcast #2 (262144 float32, 1 MiB, root 0)",
        "broadcast #2 (262144 float32, 1 MiB, root 1)"}},
      {"collectives in which neither reads",
       {broadcast_from(0), reduce_to(0)},
       {"broadcast #2 (100 float32, 400 B, root 0)",
        "reduce #2 (100 float32, 400 B, sum, root 0)"}},
      {"another size of a broadcast",
       {broadcast_from(0, 4), broadcast_from(0, 3)},
       {"broadcast #2 (4 float32, 16 B, root 0)", "broadcast #2 (3 float32, 12 B, root 0)"}},
      {"another root of a reduce",
       {reduce_to(0), reduce_to(1)},
       {"reduce #2 (100 float32, 400 B, sum, root 0)",
        "reduce #2 (100 float32, 400 B, sum, root 1)"}},
      {"other sizes of an all_gather",
       {all_gather_of(3, {3, 4}), all_gather_of(5, {3, 5})},
       {"all_gather #2 (3 float32, 12 B, parts of 12 and 16 B)",
        "all_gather #2 (5 float32, 20 B, parts of 12 and 20 B)"}},
      {"another size of a gather",
       {gather_to_0(3), gather_to_0(4)},
       {"gather #2 (3 float32, 12 B, root 0)", "gather #2 (4 float32, 16 B, root 0)"}},
      {"another size of a scatter",
       {scatter_from_0(3), scatter_from_0(4)},
       {"scatter #2 (3 float32, 12 B, root 0)", "scatter #2 (4 float32, 16 B, root 0)"}},
      {"another size of a reduce_scatter",
       {reduce_scatter_of(3), reduce_scatter_of(4)},
       {"reduce_scatter #2 (6 float32, 24 B, sum)", "reduce_scatter #2 (8 float32, 32 B, sum)"}},
      {"splits that do not mirror",
       {all_to_all_of({2, 3}, {2, 1}), all_to_all_of({1, 1}, {2, 1})},
       {"all_to_all #2 (5 float32, 20 B, sends 8 and 12 B, expects 8 and 4 B)",
        "all_to_all #2 (2 float32, 8 B, sends 4 and 4 B, expects 8 and 4 B)"}},
      {"splits of other sizes",
       {all_to_all_of({1, 40000}, {1, 1}), all_to_all_of({2, 1}, {1, 1})},
       {"all_to_all #2 (40001 float32, 156.3 KiB, sends 4 and 160000 B, expects 4 and 4 B)",
        "all_to_all #2 (3 float32, 12 B, sends 8 and 4 B, expects 4 and 4 B)"}},
  };
}

std::string disagreement_text(const std::string& backend, const Group& group,
                              const std::vector<std::string>& sides) {
  return backend + ": in group '" + group->getGroupName() + "' the ranks disagree: rank 0 calls " +
         sides[0] + ", rank 1 calls " + sides[1] +
         "; every rank must issue the same collectives in the same order";
}

/// Without what shm adds on a GPU: where tensors are, and the number of a call more, in which ranks
/// share memory before their first large one.
std::string as_on_the_host(std::string error) {
  if (testing::run_device().is_cpu()) return error;
  for (const auto& [added, plain] :
       {std::pair<std::string, std::string>{", on cuda", ""}, {"#3 (", "#2 ("}}) {
    for (size_t at = error.find(added); at != std::string::npos; at = error.find(added, at))
      error.replace(at, added.size(), plain);
  }
  return error;
}

void expect_disagreement(const std::string& backend, const Disagreement& disagreement,
                         const Group& group) {
  SCOPED_TRACE(disagreement.name);
  barrier(group);
  const auto begun = std::chrono::steady_clock::now();
  const auto error = error_of([&] { disagreement.calls[rank(group)](*group)->wait(); });
  auto sides = disagreement.texts;
  if (testing::run_device().is_cuda() && backend == "shm" && sides[1].ends_with("1 MiB, sum)"))
    sides[1] = "all_reduce (sharing memory of the GPUs, once per group)";
  EXPECT_EQ(as_on_the_host(error), disagreement_text(backend, group, sides));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 10s);
  const auto next = error_of([&] { all_reduce_of(4)(*group)->wait(); });
  EXPECT_THAT(next, AllOf(HasSubstr(backend + ": all_reduce in group '"),
                          HasSubstr("can't be used after an earlier error; end this rank"),
                          ::testing::EndsWith("The error was: " + error)));
  EXPECT_EQ(group->getBackend(testing::run_device().type())->getError(),
            c10d::ErrorType::COMM_ERROR);
}

/// With two ranks.
void expect_every_disagreement(const std::string& backend) {
  for (const auto& disagreement : disagreements()) {
    expect_disagreement(backend, disagreement, new_group({0, 1}, {.timeout = 20s}));
    call_all_reduce(sample(rank(), kSmall));  // another group still works
  }
}

/// With three ranks.
void expect_error_of_a_larger_group() {
  const auto group = new_group({0, 1, 2}, {.timeout = 20s});
  const auto error = error_of([&] { broadcast_from(rank() == 2 ? 1 : 0)(*group)->wait(); });
  EXPECT_THAT(as_on_the_host(error),
              AllOf(HasSubstr("the ranks disagree: rank "), HasSubstr(", root 0)"),
                    HasSubstr("rank 2 calls broadcast #1 (100 float32, 400 B, root 1)")));
}

/// What functions know beside the bytes; with two ranks.
void expect_disagreements_of_functions(const std::string& backend) {
  struct Case {
    std::function<void(int, const Group&)> call;
    std::vector<std::string> sides;
  };
  const std::vector<Case> cases = {
      {[](int me, const Group& group) { all_gather(at::ones({2, 2}, on()), me, group); },
       {"all_gather #1 (4 float32, 16 B, dim 0 of sizes [2, 2])",
        "all_gather #1 (4 float32, 16 B, dim 1 of sizes [2, 2])"}},
      {[](int me, const Group& group) {
         reduce_scatter(at::ones({2, 2}, on()), me, ReduceOp::SUM, group);
       },
       {"reduce_scatter #1 (4 float32, 16 B, sum, dim 0 of sizes [2, 2])",
        "reduce_scatter #1 (4 float32, 16 B, sum, dim 1 of sizes [2, 2])"}},
      {[](int me, const Group& group) { all_reduce(at::ones({2 + me, 3 - me}, on()), {}, group); },
       {"all_reduce #1 (6 float32, 24 B, sum, sizes [2, 3])",
        "all_reduce #1 (6 float32, 24 B, sum, sizes [3, 2])"}},
      {[](int me, const Group& group) { broadcast(at::ones({2}, on()), me, group); },
       {"broadcast #1 (2 float32, 8 B, root 0, sizes [2])",
        "broadcast #1 (2 float32, 8 B, root 1, sizes [2])"}},
      {[](int me, const Group& group) {
         me == 0 ? static_cast<void>(gather_bytes("a", group))
                 : static_cast<void>(broadcast_bytes("a", 0, group));
       },
       {"gather_bytes", "broadcast_bytes"}},
  };
  for (const auto& [call, sides] : cases) {
    const auto group = new_group({0, 1}, {.timeout = 20s});
    EXPECT_EQ(as_on_the_host(error_of([&, &call = call] { call(rank(), group); })),
              disagreement_text(backend, group, sides));
  }
}

class Disagree : public ::testing::TestWithParam<std::tuple<std::string, RankKind>> {
 protected:
  static std::string backend() { return std::get<0>(GetParam()); }
  static void run(int ranks, const std::function<void()>& body) {
    testing::run_ranks(std::get<1>(GetParam()), ranks, body, {.backend = backend()});
  }
};

TEST_P(Disagree, IsOneErrorOnAllRanksThatShowsBothSidesAndPoisonsOnlyThatGroup) {
  run(2, [] { expect_every_disagreement(backend()); });
}

TEST_P(Disagree, IsToldByAllRanksOfALargerGroup) { run(3, expect_error_of_a_larger_group); }

TEST_P(Disagree, ComparesWhatFunctionsKnowBesideTheBytes) {
  run(2, [] { expect_disagreements_of_functions(backend()); });
}

INSTANTIATE_TEST_SUITE_P(Backends, Disagree,
                         ::testing::Combine(::testing::Values("shm", "gloo"),
                                            ::testing::Values(RankKind::Threads,
                                                              RankKind::Processes)),
                         [](const auto& instance) {
                           return std::get<0>(instance.param) +
                                  testing::to_string(std::get<1>(instance.param));
                         });

class DisagreeOnCuda : public ::testing::TestWithParam<std::string> {
 protected:
  static void run(int ranks, const std::function<void()>& body) {
    testing::run_on({.device = at::kCUDA, .backend = GetParam(), .ranks = ranks}, body);
  }
};

TEST_P(DisagreeOnCuda, IsOneErrorOnAllRanksThatShowsBothSidesAndPoisonsOnlyThatGroup) {
  run(2, [] { expect_every_disagreement(GetParam()); });
}
TEST_P(DisagreeOnCuda, IsToldByAllRanksOfALargerGroup) { run(3, expect_error_of_a_larger_group); }
TEST_P(DisagreeOnCuda, ComparesWhatFunctionsKnowBesideTheBytes) {
  run(2, [] { expect_disagreements_of_functions(GetParam()); });
}

INSTANTIATE_TEST_SUITE_P(Backends, DisagreeOnCuda, ::testing::Values("shm", "gloo"),
                         [](const auto& instance) { return instance.param; });

TEST(DisagreeInMessages, IsAnErrorOfTheReceiver) {
  testing::run_threads(2, [] {
    for (const auto& [sent, text] : std::vector<std::pair<Call, std::string>>{
             {send_of(4), "send #1 (4 float32, 16 B, to 1)"},
             {send_of(3, at::kInt), "send #1 (3 int32, 12 B, to 1)"}}) {
      const auto group = new_group({0, 1}, {.timeout = 20s});
      const auto error = error_of([&] { (rank() == 0 ? sent : receive_of(3))(*group)->wait(); });
      const auto first = error.empty() ? error_of([&] { barrier(group); }) : error;
      EXPECT_EQ(first,
                disagreement_text("shm", group, {text, "recv #1 (3 float32, 12 B, from 0)"}));
    }
  });
}

TEST(UncheckedCalls, GoAsTheyAre) {
  for (const std::string backend : {"shm", "gloo"}) {
    SCOPED_TRACE(backend);
    testing::run_threads(
        2,
        [] {
          const auto group = new_group({0, 1}, {.check_calls = false});
          for (const int64_t count : {int64_t{3}, kLarge}) {
            EXPECT_TRUE(
                all_reduce(at::ones({count}, on()), ReduceOp::SUM, group).eq(2).all().item<bool>());
          }
          EXPECT_EQ(gather_bytes(rank() == 0 ? "a" : "bc", group),
                    (std::vector<std::string>{"a", "bc"}));
          barrier(group);
        },
        {.backend = backend});
  }
}

TEST(UncheckedCalls, LetARootOfSharedMemoryRunAhead) {
  testing::run_threads(2, [] {
    const auto group = new_group({0, 1}, {.check_calls = false});
    if (rank() == 0) broadcast_from(0)(*group)->wait();
    testing::Beacon ahead("ahead");
    rank() == 0 ? ahead.signal() : static_cast<void>(ahead.wait());
    if (rank() == 1) broadcast_from(0)(*group)->wait();
  });
}

TEST(UncheckedCalls, AreSoOnAllRanksOfAGlooGroup) {
  testing::run_threads(2,
                       [] {
                         try {
                           new_group({0, 1}, {.check_calls = rank() == 0});
                           ADD_FAILURE() << "no error";
                         } catch (const c10::ValueError& error) {
                           EXPECT_THAT(
                               error.what_without_backtrace(),
                               HasSubstr("expected check_calls (or TESSERA_CHECK_CALLS) alike"));
                         }
                       },
                       {.backend = "gloo"});
}

}  // namespace
}  // namespace tessera::comm
