#include <tessera/comm.h>

#include "comm/backends.h"
#include "comm/shm/shared_memory.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_threads;
using ::testing::StartsWith;
using Tensors = std::vector<at::Tensor>;
using Splits = std::vector<int64_t>;

void on_two_ranks(const testing::RankBody& body) {
  run_threads(2,
              [&] {
                body();
                barrier();  // a refused call has no part in the order of collectives
              },
              {.backend = "shm"});
}
c10d::Backend& shm() { return *default_group()->getBackend(at::kCPU); }

TEST(CommErrors, UnknownBackend) {
  run_threads(1,
              [] {
                auto options = testing::rank_init_options();
                options.backend = "mpi";
                EXPECT_THAT(
                    message_of([&] { init(options); }),
                    AllOf(StartsWith("init: expected one of the backends \"auto\", \"shm\", "),
                          HasSubstr("got \"mpi\"")));
              },
              {.init = false});
  on_two_ranks([] {
    EXPECT_THAT(message_of([] { new_group({0, 1}, {.backend = "smh"}); }),
                HasSubstr("got \"smh\""));
    EXPECT_THAT(message_of([] { new_group({0, 1}, {.backend = std::string("smh")}); }),
                StartsWith("new_group: expected one of the backends \"auto\", \"shm\", "));
    EXPECT_THAT(message_of([] { supports("mpi", at::kCPU, at::kFloat); }),
                HasSubstr("got \"mpi\""));
    EXPECT_THAT(message_of([] { supports(Backend::Auto, at::kCPU, at::kFloat); }),
                HasSubstr("got \"auto\""));
    EXPECT_TRUE(supports(Backend::Shm, at::kCPU, at::kFloat));
  });
}

TEST(CommErrors, RanksOfAGroup) {
  on_two_ranks([] {
    EXPECT_EQ(message_of([] { new_group({}); }),
              "new_group: expected at least one rank, got an empty list");
    EXPECT_EQ(
        message_of([] { new_group({0, 2}); }),
        "new_group: expected ranks from 0 to 1, got 0 and 2; leave out 2, or start more ranks");
    EXPECT_EQ(message_of([] { new_group({1, 1}); }),
              "new_group: expected distinct ranks, got 1 and 1; name 1 once");
    if (rank() == 1) {
      EXPECT_EQ(message_of([] { new_group({0}); }),
                "new_group: expected to be called by the listed ranks alone, got rank 1 calling it "
                "for rank 0; call it only where the rank is in the list");
    }
  });
}

TEST(CommErrors, TimeoutThatIsNotPositive) {
  on_two_ranks([] {
    using std::chrono::milliseconds;
    EXPECT_THAT(message_of([] { new_group({rank()}, {.timeout = milliseconds(0)}); }),
                HasSubstr("expected a timeout above 0, got 0 ms"));
    EXPECT_EQ(message_of([] { monitored_barrier({}, milliseconds(-1)); }),
              "monitored_barrier: expected a timeout above 0, got -1 ms");
  });
}

TEST(CommErrors, GroupOfAnEarlierWorld) {
  on_two_ranks([] {
    const auto old = new_group({0, 1});
    shutdown();
    init(testing::rank_init_options());
    EXPECT_EQ(message_of([&] { ranks(old); }),
              "ranks: expected a group made by init or new_group, got 'ranks 0,1'");
  });
}

TEST(CommErrors, MoreRanksThanSharedMemoryServes) {
  const comm::BackendRequest request{.store = c10::make_intrusive<c10d::HashStore>(),
                                     .rank = 0,
                                     .size = 65,
                                     .group_name = "all",
                                     .world_ranks = {},
                                     .timeout = std::chrono::seconds(1)};
  EXPECT_EQ(message_of([&] { comm::shm::make(request); }),
            "shm: expected at most 64 ranks in group 'all', got 65; call init({.backend = "
            "\"gloo\"})");
}

TEST(CommErrors, ALimitOnFileSizes) {
  testing::run_processes(
      1,
      [] {
        rlimit before{};
        ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
        auto small = before;
        small.rlim_cur = 1 << 20;
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
        const auto message = message_of<c10::DistBackendError>([] { comm::shm::Arena::own(); });
        setrlimit(RLIMIT_FSIZE, &before);
        EXPECT_EQ(message,
                  "shm: could not make a memory file of 64 MiB: File too large; raise the limit on "
                  "file sizes (ulimit -f), or call init({.backend = \"gloo\"})");
      },
      {.init = false});
}

TEST(CommErrors, TensorThatIsNotOnTheCpu) {
  on_two_ranks([] {
    Tensors tensors{at::empty({2}, at::device(at::kMeta))};
    EXPECT_EQ(message_of([&] { shm().allreduce(tensors, {}); }),
              "shm: all_reduce: expected a CPU tensor, got one on meta; use the nccl backend for "
              "CUDA tensors or move it "
              "with .cpu()");
  });
}

/// What the group sees of a tensor on a device, without the device.
at::Tensor pretended_cuda_tensor() {
  return at::detail::make_tensor<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                  caffe2::TypeMeta::Make<float>(),
                                                  c10::Device(at::kCUDA, 0));
}

TEST(CommErrors, TensorOnADeviceThatTheGroupHasNoBackendFor) {
  on_two_ranks([] {
    const auto tensor = pretended_cuda_tensor();
    EXPECT_EQ(message_of([&] { all_reduce(tensor); }),
              "all_reduce: expected a tensor on cpu (shm) in group 'world', got one on cuda:0; "
              "move it there with .to(), or make the group with a backend for cuda (nccl)");
    EXPECT_THAT(message_of([&] { broadcast(tensor, 0); }),
                StartsWith("broadcast: expected a tensor"));
    EXPECT_THAT(message_of([&] { all_to_all(tensor); }),
                StartsWith("all_to_all: expected a tensor"));
  });
}

TEST(CommErrors, TensorThatIsNotDense) {
  on_two_ranks([] {
    Tensors tensors{at::ones({2}).to_sparse()};
    EXPECT_EQ(message_of([&] { shm().broadcast(tensors, {}); }),
              "shm: broadcast: expected a dense tensor, got layout Sparse; call .to_dense(), or "
              "gather indices and "
              "values separately");
  });
}

TEST(CommErrors, TensorThatIsUndefined) {
  on_two_ranks([] {
    Tensors tensors{at::Tensor()};
    EXPECT_EQ(message_of([&] { shm().allreduce(tensors, {}); }),
              "shm: all_reduce: expected a tensor, got an undefined one");
  });
}

TEST(CommErrors, TensorWhoseElementsShareMemory) {
  on_two_ranks([] {
    Tensors tensors{at::ones({1}).expand({3})};
    EXPECT_EQ(message_of([&] { shm().allreduce(tensors, {}); }),
              "shm: all_reduce: expected a tensor that can be written, got one whose elements "
              "share memory (sizes [3], "
              "strides [0]); call .clone() first");
  });
}

TEST(CommErrors, SeveralTensorsInOneCall) {
  on_two_ranks([] {
    Tensors tensors{at::ones({1}), at::ones({1})};
    EXPECT_EQ(
        message_of([&] { shm().allreduce(tensors, {}); }),
        "shm: all_reduce: expected one tensor per rank, got 2; use the coalesced form for several");
    std::vector<Tensors> lists;
    Tensors one{at::ones({1})};
    EXPECT_EQ(message_of([&] { shm().allgather(lists, one, {}); }),
              "shm: all_gather: expected one list of tensors per rank, got 0");
  });
}

TEST(CommErrors, NumberOfOutputsOrInputs) {
  on_two_ranks([] {
    Tensors one{at::ones({1})};
    std::vector<Tensors> three{{at::ones({1}), at::ones({1}), at::ones({1})}};
    EXPECT_EQ(message_of([&] { shm().allgather(three, one, {}); }),
              "shm: all_gather: expected 2 outputs tensors, one per rank, got 3");
    EXPECT_EQ(message_of([&] { shm().reduce_scatter(one, three, {}); }),
              "shm: reduce_scatter: expected 2 inputs tensors, one per rank, got 3");
    EXPECT_EQ(message_of([&] { shm().alltoall(three[0], one, {}); }),
              "shm: all_to_all: expected 2 inputs tensors, one per rank, got 1");
    Tensors none;
    EXPECT_EQ(message_of([&] { shm().alltoall(three[0], none, {}); }),
              "shm: all_to_all: expected 2 input tensors, one per rank, got none");
    EXPECT_EQ(
        message_of([&] { shm().allgather_into_tensor_coalesced(three[0], one, {}); }),
        "shm: all_gather_into_tensor_coalesced: expected as many outputs as inputs, got 3 and 1");
  });
}

TEST(CommErrors, SizeOfOutputOrInput) {
  on_two_ranks([] {
    auto input = at::ones({3});
    auto output = at::ones({7});
    EXPECT_EQ(
        message_of([&] { shm()._allgather_base(output, input, {}); }),
        "shm: all_gather_into_tensor: expected a tensor of 2 x 3 elements for 2 ranks, got 7");
    EXPECT_EQ(message_of([&] { shm()._reduce_scatter_base(input, output, {}); }),
              "shm: reduce_scatter_tensor: expected a tensor of 2 x 3 elements for 2 ranks, got 7");
    Tensors one{at::ones({3})};
    std::vector<Tensors> parts{{at::ones({3}), at::ones({4})}};
    EXPECT_EQ(message_of([&] { shm().reduce_scatter(one, parts, {}); }),
              "shm: reduce_scatter: expected inputs tensors of 3 elements, got one of 4");
    parts[0] = {at::ones({4}), at::ones({4})};
    EXPECT_EQ(message_of([&] { shm().allgather(parts, one, {}); }),
              "shm: all_gather: expected the own part to be as large going out as coming in, got 3 "
              "and 4");
  });
}

TEST(CommErrors, DtypesThatDiffer) {
  on_two_ranks([] {
    auto input = at::ones({3});
    auto output = at::ones({6}, at::kDouble);
    EXPECT_EQ(
        message_of<c10::TypeError>([&] { shm()._allgather_base(output, input, {}); }),
        "shm: all_gather_into_tensor: expected tensors of one dtype, got float64 and float32");
    Splits equal;
    EXPECT_EQ(
        message_of<c10::TypeError>([&] { shm().alltoall_base(output, input, equal, equal, {}); }),
        "shm: all_to_all_single: expected tensors of one dtype, got float64 and float32");
  });
}

TEST(CommErrors, RootOutsideTheGroup) {
  on_two_ranks([] {
    Tensors tensors{at::ones({3})};
    EXPECT_EQ(message_of([&] { shm().broadcast(tensors, {.rootRank = 2}); }),
              "shm: broadcast: expected a root from 0 to 1, got 2");
    std::vector<Tensors> none;
    EXPECT_EQ(message_of([&] { shm().gather(none, tensors, {.rootRank = -1}); }),
              "shm: gather: expected a root from 0 to 1, got -1");
    EXPECT_THAT(message_of([&] { shm().send(tensors, 2, 0); }),
                AllOf(StartsWith("shm: send: "), HasSubstr("from 0 to 1, got 2")));
    EXPECT_THAT(message_of([&] { shm().recv(tensors, -2, 0); }),
                AllOf(StartsWith("shm: recv: "), HasSubstr("from 0 to 1, got -2")));
    EXPECT_EQ(message_of([&] { broadcast(tensors[0], 2); }),
              "broadcast: expected a source from 0 to 1, got 2");
    EXPECT_EQ(message_of([&] { broadcast_bytes("", -1); }),
              "broadcast_bytes: expected a source from 0 to 1, got -1");
  });
}

TEST(CommErrors, ListOnARankThatIsNotTheRoot) {
  on_two_ranks([] {
    Tensors tensors{at::ones({3})};
    std::vector<Tensors> lists{{at::ones({3}), at::ones({3})}};
    const int other = 1 - rank();
    const auto who = " tensors on rank " + std::to_string(rank()) + ", which is not the root " +
                     std::to_string(other);
    EXPECT_EQ(message_of([&] { shm().gather(lists, tensors, {.rootRank = other}); }),
              "shm: gather: expected no outputs" + who);
    EXPECT_EQ(message_of([&] { shm().scatter(tensors, lists, {.rootRank = other}); }),
              "shm: scatter: expected no inputs" + who);
  });
}

TEST(CommErrors, SplitsThatDoNotFit) {
  on_two_ranks([] {
    auto input = at::ones({5, 2});
    auto output = at::ones({4, 2});
    Splits equal;
    const auto call = [&](Splits output_splits, Splits input_splits) {
      return message_of(
          [&] { shm().alltoall_base(output, input, output_splits, input_splits, {}); });
    };
    EXPECT_EQ(call({}, {}),
              "shm: all_to_all_single: expected the input's 5 rows to be divisible by 2 ranks; "
              "pass split sizes");
    EXPECT_EQ(call({}, {2, 2}),
              "shm: all_to_all_single: expected the input splits to add up to its 5 rows, got 4");
    EXPECT_EQ(call({4}, {2, 3}), "shm: all_to_all_single: expected 2 output splits, got 1");
    EXPECT_EQ(call({-1, 5}, {2, 3}),
              "shm: all_to_all_single: expected output splits of 0 or more rows, got -1");
    EXPECT_EQ(message_of([&] { all_to_all(input); }),
              "all_to_all: expected a first dimension divisible by 2 ranks, got sizes [5, 2]; pass "
              "output_splits and "
              "input_splits");
    EXPECT_EQ(message_of([&] { all_to_all(input, {5}, {2, 3}); }),
              "all_to_all: expected 2 output splits, one per rank, got 1");
  });
}

TEST(CommErrors, DimensionThatCannotBeCut) {
  on_two_ranks([] {
    EXPECT_EQ(message_of([] { reduce_scatter(at::ones({2, 3}), 1); }),
              "reduce_scatter: expected dimension 1 to be divisible by 2 ranks, got sizes [2, 3]; "
              "pad it first");
    EXPECT_EQ(message_of([] { reduce_scatter(at::ones({2}), 1); }),
              "reduce_scatter: expected a dim from -1 to 0, got 1");
    EXPECT_EQ(message_of([] { all_gather(at::scalar_tensor(1)); }),
              "all_gather: expected a tensor with at least one dimension, got a scalar; unsqueeze "
              "it first");
  });
}

TEST(CommErrors, OperationThatTheDtypeDoesNotHave) {
  on_two_ranks([] {
    const auto reduce = [](at::ScalarType dtype, ReduceOp op) {
      Tensors tensors{at::ones({2}, dtype)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      return message_of<c10::TypeError>([&] { shm().allreduce(tensors, options); });
    };
    EXPECT_EQ(reduce(at::kFloat, ReduceOp::BAND),
              "shm: all_reduce: band of float32 tensors has no meaning here; this dtype has: sum, "
              "avg, product, min, max");
    EXPECT_THAT(reduce(at::kLong, ReduceOp::AVG),
                StartsWith("shm: all_reduce: avg of int64 tensors has no meaning here; "));
    EXPECT_THAT(reduce(at::kComplexFloat, ReduceOp::MAX),
                HasSubstr("max of complex64 tensors has no meaning here"));
    EXPECT_THAT(reduce(at::kFloat8_e5m2, ReduceOp::SUM),
                HasSubstr("this dtype has: none; convert it first"));
  });
}

TEST(CommErrors, SharedTensorThatCannotBe) {
  on_two_ranks([] {
    EXPECT_EQ(message_of([] { empty_shared({2}, at::device(at::kMeta)); }),
              "empty_shared: expected a CPU tensor, got device meta");
    EXPECT_EQ(message_of([] { empty_shared({2}, at::TensorOptions(at::kSparse)); }),
              "empty_shared: expected a dense tensor, got layout Sparse");
    EXPECT_EQ(message_of([] { empty_shared({2, -1}); }),
              "empty_shared: expected sizes of 0 or more, got [2, -1]");
    constexpr int64_t kHuge = int64_t{1} << 62;
    EXPECT_EQ(
        message_of([] { empty_shared({kHuge, 4}); }),
        "empty_shared: a tensor of sizes [4611686018427387904, 4] is larger than memory can be");
    EXPECT_THAT(message_of<c10::OutOfMemoryError>([] { empty_shared({int64_t{1} << 50}); }),
                AllOf(StartsWith("empty_shared: expected 4096"),
                      HasSubstr("of shared memory, got an arena of ")));
  });
}

TEST(CommErrors, CoalescingThatIsNotPaired) {
  on_two_ranks([] {
    EXPECT_EQ(message_of<c10::Error>([] { shm().endCoalescing(); }),
              "shm: endCoalescing: call startCoalescing first");
    shm().startCoalescing();
    EXPECT_EQ(message_of<c10::Error>([] { shm().startCoalescing(); }),
              "shm: startCoalescing: already coalescing; call endCoalescing first");
    shm().endCoalescing()->wait();
  });
}

TEST(CommErrors, WhatAWorkDoesNotKnowOrDo) {
  on_two_ranks([] {
    const testing::Beacon asked("asked");
    EXPECT_TRUE(rank() == 0 || asked.wait());
    Tensors tensors{at::ones({2})};
    const auto work = default_group()->allreduce(tensors);
    EXPECT_EQ(message_of<c10::NotImplementedError>([&] { work->abort(); }),
              "shm: a collective can't be aborted alone; shut the group down");
    if (rank() == 0) {
      EXPECT_EQ(message_of<c10::Error>([&] { work->getDuration(); }),
                "shm: getDuration: expected a completed collective, got one under way; wait() for "
                "it first");
      asked.signal();
    }
    work->wait();
    EXPECT_GE(work->getDuration(), 0);
  });
}

TEST(CommErrors, GradientThatDoesNotExist) {
  on_two_ranks([] {
    const auto leaf = at::ones({2}).set_requires_grad(true);
    const auto result = all_reduce(leaf, ReduceOp::PRODUCT);
    EXPECT_EQ(
        message_of<c10::NotImplementedError>([&] { result.sum().backward(); }),
        "all_reduce: product is not differentiable; detach the tensor or use sum, avg, min or max");
  });
}

}  // namespace
}  // namespace tessera
