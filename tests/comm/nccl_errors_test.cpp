// What a user of NCCL is told. Ranks that are killed or stopped: PeerOnCuda.
#include "comm/errors_of_calls.h"
#include "support/beacon.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <thread>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Not;
using ::testing::StartsWith;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

const testing::DeviceCase kTwoRanks{.device = at::kCUDA, .backend = "nccl", .ranks = 2};

at::Tensor ones_on_gpu(int64_t count) { return at::ones({count}, testing::run_device()); }

WorkPtr call_all_reduce_of(const Group& group, int64_t count) {
  Tensors tensors{ones_on_gpu(count)};
  return group->allreduce(tensors);
}

/// What the call ends with; empty if it does not fail in time. Its wait() leaves the host alone.
std::string error_once_known(const Group& group, int64_t count) {
  return error_of([&] {
    const auto work = call_all_reduce_of(group, count);
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (!work->exception() && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(20ms);
    work->wait();
  });
}

TEST(NcclErrorsOnCuda, ArgumentsThatNcclDoesNotTake) {
  testing::run_on(kTwoRanks, [] {
    auto& nccl = *default_group()->getBackend(at::kCUDA);
    Tensors on_cpu{at::ones({2})};
    EXPECT_THAT(message_of([&] { nccl.allreduce(on_cpu); }),
                StartsWith("nccl: all_reduce: expected a CUDA tensor, got one on cpu; "));
    Tensors strided{ones_on_gpu(4).view({2, 2}).t()};
    EXPECT_THAT(message_of([&] { nccl.allreduce(strided); }),
                StartsWith("nccl: all_reduce: expected a contiguous tensor, got sizes [2, 2]"));
    Tensors numbers{ones_on_gpu(4)};
    EXPECT_THAT(message_of<c10::TypeError>(
                    [&] { nccl.allreduce(numbers, {.reduceOp = c10d::ReduceOp::BXOR}); }),
                StartsWith("nccl: all_reduce: NCCL has no "));
    nccl.allreduce(numbers)->wait();  // refused calls have no part in the order of collectives
    EXPECT_EQ(numbers[0].sum().item<float>(), 8);
  });
}

TEST(NcclErrorsOnCuda, ATimeoutNamesTheRankThatIsMissingAndItsLastCall) {
  testing::run_on(kTwoRanks, [] {
    const auto group = new_group({0, 1}, {.timeout = 4s});
    call_all_reduce_of(group, 4)->wait();
    const testing::Beacon told("told");
    if (rank() == 0) {
      EXPECT_THAT(error_once_known(group, 4),
                  AllOf(HasSubstr("nccl: all_reduce #2 (4 float32, 16 B, sum)"),
                        HasSubstr("timed out after"),
                        HasSubstr("of waiting for rank 1, which did not make this call; the last "
                                  "call of rank 1 is all_reduce #1 (4 float32, 16 B, sum)")));
      told.signal();
    } else {
      EXPECT_TRUE(told.wait(60s));
      EXPECT_THAT(error_once_known(group, 4),
                  AllOf(HasSubstr("nccl: all_reduce #2"),
                        HasSubstr("a peer has given up, rank 0: timed out after")));
    }
  });
}

TEST(NcclErrorsOnCuda, AFailureShowsCallsThatDiffer) {
  testing::run_on(kTwoRanks, [] {
    const auto group = new_group({0, 1}, {.timeout = 4s});
    call_all_reduce_of(group, 4)->wait();
    const testing::Beacon told("told");
    if (rank() == 0) {  // waits for more than its peer sends, until NCCL complains or time is up
      EXPECT_THAT(error_once_known(group, 4 << 20),
                  AllOf(HasSubstr("nccl: all_reduce #2 (4194304 float32, 16 MiB, sum)"),
                        HasSubstr("the ranks disagree: "),
                        HasSubstr("all_reduce #2 (4 float32, 16 B, sum)")));
      told.signal();
    } else {
      // NCCL may have done its part without a complaint: then the next call tells.
      auto error = error_of([&] { call_all_reduce_of(group, 4)->wait(); });
      EXPECT_TRUE(told.wait(60s));
      if (error.empty()) error = error_once_known(group, 4);
      EXPECT_THAT(error, Not(IsEmpty()));
    }
  });
}

TEST(NcclErrorsOnCuda, RanksThatShareAGpuAreToldWhatToDo) {
  if (testing::gpu_count() > 1) GTEST_SKIP() << "every rank has a GPU of its own here";
  testing::run_on(kTwoRanks,
                  [] {
                    EXPECT_THAT(
                        message_of([] { init(testing::rank_init_options()); }),
                        AllOf(StartsWith("nccl: group 'world': expected a GPU for each rank, but "
                                         "ranks 0 and 1 share GPU-"),
                              HasSubstr("use the backend shm"), HasSubstr("NCCL_HOSTID")));
                  },
                  {.init = false, .environment = {{"NCCL_HOSTID", ""}}});
}

TEST(NcclErrorsOnCuda, BlockingWaitsAreNoTimeouts) {
  testing::run_on(kTwoRanks,
                  [] {
                    // NCCL takes seconds to load its kernels.
                    EXPECT_EQ(all_reduce(ones_on_gpu(4)).sum().item<float>(), 8);
                    const auto group = new_group({0, 1}, {.timeout = 4s});
                    EXPECT_EQ(all_reduce(ones_on_gpu(4), {}, group).sum().item<float>(), 8);
                    std::this_thread::sleep_for(5s);  // the watch has looked meanwhile
                    EXPECT_EQ(error_of([&] {
                                EXPECT_EQ(all_reduce(ones_on_gpu(4), {}, group).sum().item<float>(),
                                          8);
                              }),
                              "");
                  },
                  {.environment = {{"TORCH_NCCL_BLOCKING_WAIT", "1"}}});
}

}  // namespace
}  // namespace tessera::comm
