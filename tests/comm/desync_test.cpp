#include "comm/collective_cases.h"
#include "comm/errors_of_calls.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

#include <functional>

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::RankKind;

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Call = std::function<WorkPtr(c10d::ProcessGroup&)>;

Call all_reduce_of(int64_t count, at::ScalarType dtype = at::kFloat, ReduceOp op = ReduceOp::SUM) {
  return [=](c10d::ProcessGroup& group) {
    Tensors tensors{at::ones({count}, dtype)};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    return group.allreduce(tensors, options);
  };
}
Call broadcast_from(int root, int64_t count = kSmall) {
  return [=](c10d::ProcessGroup& group) {
    Tensors tensors{at::ones({count})};
    return group.broadcast(tensors, {.rootRank = root});
  };
}
Call reduce_to(int root) {
  return [=](c10d::ProcessGroup& group) {
    Tensors tensors{at::ones({kSmall})};
    c10d::ReduceOptions options;
    options.rootRank = root;
    return group.reduce(tensors, options);
  };
}
Call all_gather_of(int64_t own, const std::vector<int64_t>& counts) {
  return [=](c10d::ProcessGroup& group) {
    Tensors inputs{at::ones({own})};
    std::vector<Tensors> outputs(1);
    for (const auto count : counts) outputs[0].push_back(at::zeros({count}));
    return group.allgather(outputs, inputs);
  };
}
Call gather_to_0(int64_t count) {
  return [=](c10d::ProcessGroup& group) {
    Tensors inputs{at::ones({count})};
    std::vector<Tensors> outputs;
    if (group.getRank() == 0) outputs = {{at::zeros({count}), at::zeros({count})}};
    return group.gather(outputs, inputs);
  };
}
Call scatter_from_0(int64_t count) {
  return [=](c10d::ProcessGroup& group) {
    Tensors outputs{at::zeros({count})};
    std::vector<Tensors> inputs;
    if (group.getRank() == 0) inputs = {{at::ones({count}), at::ones({count})}};
    return group.scatter(outputs, inputs);
  };
}
Call reduce_scatter_of(int64_t count) {
  return [=](c10d::ProcessGroup& group) {
    auto input = at::ones({2 * count});
    auto output = at::zeros({count});
    return group.getBackend(at::kCPU)->_reduce_scatter_base(output, input, {});
  };
}
Call all_to_all_of(std::vector<int64_t> sent, std::vector<int64_t> received) {
  return [=](c10d::ProcessGroup& group) mutable {
    auto input = at::ones({sent[0] + sent[1]});
    auto output = at::zeros({received[0] + received[1]});
    return group.getBackend(at::kCPU)->alltoall_base(output, input, received, sent, {});
  };
}
Call barrier_call() {
  return [](c10d::ProcessGroup& group) { return group.barrier(); };
}
Call send_of(int64_t count, at::ScalarType dtype = at::kFloat) {
  return [=](c10d::ProcessGroup& group) {
    Tensors tensors{at::ones({count}, dtype)};
    return group.send(tensors, 1, 0);
  };
}
Call receive_of(int64_t count) {
  return [=](c10d::ProcessGroup& group) {
    Tensors tensors{at::zeros({count})};
    return group.recv(tensors, 0, 0);
  };
}

/// What rank 0 and rank 1 call, which of them would read the other's data, and both sides as the
/// error shows them.
struct Disagreement {
  std::string name;
  std::vector<Call> calls;
  std::vector<int> readers;
  std::vector<std::string> texts;
};

std::vector<Disagreement> disagreements() {
  return {
      {"another collective",
       {all_reduce_of(4), broadcast_from(0, 4)},
       {0, 1},
       {"rank 0 calls all_reduce #2 (4 float32, 16 B, sum)",
        "rank 1 calls broadcast #2 (4 float32, 16 B, root 0)"}},
      {"a barrier against data",
       {barrier_call(), all_reduce_of(4)},
       {0, 1},
       {"rank 0 calls barrier #2", "rank 1 calls all_reduce #2 (4 float32, 16 B, sum)"}},
      {"another dtype of the same size",
       {all_reduce_of(4), all_reduce_of(4, at::kInt)},
       {0, 1},
       {"rank 0 calls all_reduce #2 (4 float32, 16 B, sum)",
        "rank 1 calls all_reduce #2 (4 int32, 16 B, sum)"}},
      {"another size",
       {all_reduce_of(4), all_reduce_of(5)},
       {0, 1},
       {"(4 float32, 16 B, sum)", "(5 float32, 20 B, sum)"}},
      {"large against small",
       {all_reduce_of(4), all_reduce_of(kLarge)},
       {0, 1},
       {"(4 float32, 16 B, sum)", "(262144 float32, 1 MiB, sum)"}},
      {"empty against something",
       {all_reduce_of(0), all_reduce_of(4)},
       {0, 1},
       {"(0 float32, 0 B, sum)", "(4 float32, 16 B, sum)"}},
      {"another operation",
       {all_reduce_of(4), all_reduce_of(4, at::kFloat, ReduceOp::MAX)},
       {0, 1},
       {"(4 float32, 16 B, sum)", "(4 float32, 16 B, max)"}},
      {"another root of a broadcast",
       {broadcast_from(0), broadcast_from(1)},
       {},
       {"calls broadcast #2 (100 float32, 400 B, root 0)",
        "calls broadcast #2 (100 float32, 400 B, root 1)"}},
      {"collectives in which neither reads",
       {broadcast_from(0), reduce_to(0)},
       {},
       {"rank 0 calls broadcast #2 (100 float32, 400 B, root 0)",
        "rank 1 calls reduce #2 (100 float32, 400 B, sum, root 0)"}},
      {"another size of a broadcast",
       {broadcast_from(0, 4), broadcast_from(0, 3)},
       {1},
       {"rank 0 calls broadcast #2 (4 float32, 16 B, root 0)",
        "rank 1 calls broadcast #2 (3 float32, 12 B, root 0)"}},
      {"another root of a reduce", {reduce_to(0), reduce_to(1)}, {0, 1}, {"root 0)", "root 1)"}},
      {"other sizes of an all_gather",
       {all_gather_of(3, {3, 4}), all_gather_of(5, {3, 5})},
       {0},
       {"rank 1 sends all_gather #2 (5 float32, 20 B)", "rank 0 has room for 16 bytes of it"}},
      {"another size of a gather",
       {gather_to_0(3), gather_to_0(4)},
       {0},
       {"(3 float32, 12 B, root 0)", "(4 float32, 16 B, root 0)"}},
      {"another size of a scatter",
       {scatter_from_0(3), scatter_from_0(4)},
       {1},
       {"(3 float32, 12 B, root 0)", "(4 float32, 16 B, root 0)"}},
      {"another size of a reduce_scatter",
       {reduce_scatter_of(3), reduce_scatter_of(4)},
       {0, 1},
       {"(6 float32, 24 B, sum)", "(8 float32, 32 B, sum)"}},
      {"splits that do not mirror",
       {all_to_all_of({2, 3}, {2, 1}), all_to_all_of({1, 1}, {2, 1})},
       {1},
       {"rank 0 sends 12 bytes to rank 1, which expects 8"}},
      {"splits of other sizes",
       {all_to_all_of({1, 40000}, {1, 1}), all_to_all_of({2, 1}, {1, 1})},
       {0, 1},
       {" bytes to rank "}},
      {"another size of a message",
       {send_of(4), receive_of(3)},
       {1},
       {"rank 0 calls send #1 (4 float32, 16 B, to 1)",
        "rank 1 calls recv #1 (3 float32, 12 B, from 0)"}},
      {"another dtype of a message",
       {send_of(4, at::kInt), receive_of(4)},
       {1},
       {"(4 int32, 16 B, to 1)", "(4 float32, 16 B, from 0)"}},
  };
}

void expect_disagreement(const Disagreement& disagreement, const Group& group) {
  SCOPED_TRACE(disagreement.name + " in group " + group->getGroupName());
  barrier(group);
  const int me = rank(group);
  const auto error = error_of([&] { disagreement.calls[me](*group)->wait(); });
  if (std::ranges::count(disagreement.readers, me) > 0) {
    EXPECT_THAT(error, AllOf(HasSubstr("the ranks disagree: "),
                             HasSubstr("in group '" + group->getGroupName() + "'")));
  }
  // Whoever had no part in the mistake hears of it as soon as the group does something again.
  const auto first = error.empty() ? error_of([&] {
    barrier(group);
    barrier(group);
  })
                                   : error;
  EXPECT_THAT(first, HasSubstr("the ranks disagree: "));
  for (const auto& text : disagreement.texts) EXPECT_THAT(first, HasSubstr(text));
  const auto next = error_of([&] { all_reduce_of(4)(*group)->wait(); });
  EXPECT_THAT(next, AllOf(HasSubstr("shm: all_reduce in group '"),
                          HasSubstr("can't be used after an earlier error ("),
                          HasSubstr(first.substr(0, 80))));
  EXPECT_EQ(group->getBackend(at::kCPU)->getError(), c10d::ErrorType::COMM_ERROR);
}

TEST(DisagreeLate, IsFoundWhenNobodyEverReads) {
  testing::run_threads(2, [] {
    const auto group = new_group({0, 1}, {.timeout = 20s});
    const auto error = error_of([&] {
      for (int i = 0; i < 100; ++i) broadcast_from(i == 3 ? rank() : 0)(*group)->wait();
    });
    EXPECT_THAT(error, AllOf(HasSubstr("broadcast #4 (100 float32, 400 B, root 0)"),
                             HasSubstr("broadcast #4 (100 float32, 400 B, root 1)")));
  });
}

class Disagree : public ::testing::TestWithParam<RankKind> {};

TEST_P(Disagree, IsAnErrorThatShowsBothSidesAndPoisonsOnlyThatGroup) {
  testing::run_ranks(GetParam(), 2, [] {
    for (const auto& disagreement : disagreements()) {
      expect_disagreement(disagreement, new_group({0, 1}, {.timeout = 20s}));
      call_all_reduce(sample(rank(), kSmall));  // another group still works
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Disagree, ::testing::Values(RankKind::Threads, RankKind::Processes),
                         [](const auto& instance) { return testing::to_string(instance.param); });

}  // namespace
}  // namespace tessera::comm::shm
