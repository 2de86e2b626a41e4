// What only GPUs have: streams, memory that is used again at once, and peers that end while a
// stream waits for them.
#include <tessera/compile.h>

#include "comm/cuda_tensors.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <limits>
#include <thread>

namespace tessera::collective_bodies {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using testing::Beacon;
using testing::DeviceCase;
using testing::expect_bitwise_equal;
using ::testing::HasSubstr;
using testing::run_device;
using testing::run_on;

c10::Stream side_stream() {
  return c10::impl::VirtualGuardImpl(run_device().type()).getStreamFromGlobalPool(run_device());
}

class StreamsOnCuda : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(Every, StreamsOnCuda,
                         ::testing::ValuesIn(testing::cuda_cases({"nccl", "shm", "gloo"})),
                         testing::case_name);

constexpr int64_t kElementCounts[] = {10, 1 << 20};

TEST_P(StreamsOnCuda, TensorsMayComeFromAnyStream) {
  run_on(GetParam(), [] {
    for (const int64_t count : kElementCounts) {
      const c10::StreamGuard guard(side_stream());
      keep_busy();
      Tensors tensors{own_number(count)};
      default_group()->allreduce(tensors)->wait();
      const auto twice = tensors[0] * 2;  // on the stream that waited, without the host
      expect_filled(twice, 2.0 * sum_of_numbers(), "in place");
      expect_filled(all_reduce(own_number(count)), sum_of_numbers(), "functional");
    }
  });
}

TEST_P(StreamsOnCuda, ResultsAreThereForTheStreamThatWaits) {
  run_on(GetParam(), [] {
    for (const int64_t count : kElementCounts) {
      for (const bool is_busy : {true, false}) {
        if (is_busy) keep_busy();
        Tensors tensors{own_number(count)};
        if (!is_busy) tensors[0].cpu();  // nothing is left to wait for
        const auto work = default_group()->allreduce(tensors);
        const c10::StreamGuard guard(side_stream());
        work->wait();
        expect_filled(tensors[0].clone(), sum_of_numbers(), "on another stream");
      }
    }
  });
}

TEST_P(StreamsOnCuda, TheNextKernelWaitsForTheCollective) {
  run_on(GetParam(), [] {
    for (const int64_t count : kElementCounts) {
      auto tensor = own_number(count);
      for (int turn = 0; turn < 10; ++turn) {  // no host wait in between
        Tensors tensors{tensor};
        default_group()->allreduce(tensors, {.reduceOp = c10d::ReduceOp::AVG})->wait();
        tensor.mul_(2);
      }
      // The average of 1 to n, doubled: from the second turn on all ranks hold the same.
      expect_filled(tensor, sum_of_numbers() * 1024.0 / world_size(), "chain");
    }
  });
}

TEST_P(StreamsOnCuda, AFreedInputIsReadBeforeItsMemoryIsUsedAgain) {
  run_on(GetParam(), [] {
    const Setting setting{.backend = "", .ranks = world_size(), .device = run_device()};
    for (int turn = 0; turn < 10; ++turn) {
      for (const int64_t count : kElementCounts) {
        keep_busy();
        auto whole = at::zeros({world_size(), count}, on());
        auto input = own_number(count);
        const auto work = backend(setting)->_allgather_base(whole, input, {});
        input.reset();
        // The allocator hands out the input's memory again.
        const auto poison = at::full({count}, std::numeric_limits<float>::quiet_NaN(), on());
        work->wait();
        for (int peer = 0; peer < world_size(); ++peer)
          expect_filled(whole[peer], peer + 1, "turn " + std::to_string(turn));
        EXPECT_TRUE(poison.isnan().all().item<bool>()) << "written after it was freed";
      }
    }
  });
}

TEST_P(StreamsOnCuda, AFreedStridedInputIsReadBeforeItsMemoryIsUsedAgain) {
  if (GetParam().backend == "nccl") GTEST_SKIP() << "NCCL takes contiguous tensors alone";
  run_on(GetParam(), [] {
    const Setting setting{.backend = "", .ranks = world_size(), .device = run_device()};
    for (int turn = 0; turn < 3; ++turn) {
      for (const int64_t count : kElementCounts) {
        keep_busy();
        auto whole = at::zeros({world_size(), count}, on());
        auto input = own_number(2 * count).view({count, 2}).select(1, 0);
        const auto work = backend(setting)->_allgather_base(whole, input, {});
        input.reset();
        const auto poison = at::full({2 * count}, std::numeric_limits<float>::quiet_NaN(), on());
        work->wait();
        for (int peer = 0; peer < world_size(); ++peer)
          expect_filled(whole[peer], peer + 1, "turn " + std::to_string(turn));
      }
    }
  });
}

TEST_P(StreamsOnCuda, SmallCallsUnderWayTogetherComeThroughInOrder) {
  run_on(GetParam(), [] {
    constexpr int kCalls = 20;  // more than there are slots
    for (const bool is_busy : {false, true}) {
      if (is_busy) keep_busy();
      std::vector<Tensors> tensors;
      std::vector<WorkPtr> works;
      for (int i = 0; i < kCalls; ++i) {
        tensors.push_back({at::full({8}, rank() + i, on())});
        works.push_back(default_group()->allreduce(tensors.back()));
      }
      for (int i = kCalls - 1; i >= 0; --i) {
        works[i]->wait();
        const auto twice = tensors[i][0] * 2;
        works[i].reset();
        expect_filled(twice, 2.0 * (sum_of_numbers() + world_size() * (i - 1)),
                      "call " + std::to_string(i));
      }
    }
  });
}

TEST_P(StreamsOnCuda, AFreedResultIsWrittenBeforeItsMemoryIsUsedAgain) {
  run_on(GetParam(), [] {
    for (int turn = 0; turn < 10; ++turn) {
      for (const int64_t count : kElementCounts) {
        keep_busy();
        Tensors tensors{own_number(count)};
        const auto work = default_group()->allreduce(tensors);
        tensors.clear();
        const auto other = at::full({count}, -1, on());
        work->wait();
        expect_filled(other, -1, "turn " + std::to_string(turn));
      }
    }
  });
}

TEST_P(StreamsOnCuda, TensorsOfManyRoundsComeThrough) {
  run_on(GetParam(), [] {
    const Setting setting{.backend = "", .ranks = world_size(), .device = run_device()};
    const int64_t count = (16 << 20) + 3;  // 64 MiB and a little
    auto own = pattern(setting, rank(), count);
    auto expected = at::zeros({count}, on());
    for (int peer = 0; peer < world_size(); ++peer) expected += pattern(setting, peer, count);
    Tensors tensors{own.clone()};
    default_group()->allreduce(tensors)->wait();
    EXPECT_TRUE(tensors[0].equal(expected)) << "all_reduce";
    auto whole = at::zeros({world_size(), count}, on());
    backend(setting)->_allgather_base(whole, own, {})->wait();
    for (int peer = 0; peer < world_size(); ++peer)
      EXPECT_TRUE(whole[peer].equal(pattern(setting, peer, count))) << "all_gather of " << peer;
  });
}

class GroupsOnCuda : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(Every, GroupsOnCuda,
                         ::testing::ValuesIn(testing::cuda_cases({"nccl", "shm", "gloo"})),
                         testing::case_name);

TEST_P(GroupsOnCuda, KeepTheOrderOfTheirLists) {
  run_on(GetParam(), [] {
    std::vector<int> backwards;
    for (int peer = world_size() - 1; peer >= 0; --peer) backwards.push_back(peer);
    const auto group = new_group(backwards);
    EXPECT_EQ(rank(group), world_size() - 1 - rank());
    expect_bitwise_equal(all_gather(own_number(1), 0, group),
                         at::arange(world_size(), 0, -1).to(at::kFloat), "all_gather");
    expect_filled(broadcast(own_number(3), 0, group), world_size(), "broadcast");
    EXPECT_EQ(gather_bytes(std::to_string(rank()), group)[0], std::to_string(world_size() - 1));
  });
}

TEST_P(GroupsOnCuda, OfNeighboursWorkBesideTheWorld) {
  run_on(GetParam(), [] {
    const int first = rank() / 2 * 2;
    const auto pair = new_group({first, first + 1});
    for (int turn = 0; turn < 10; ++turn) {
      expect_filled(all_reduce(own_number(100), ReduceOp::SUM, pair), 2 * first + 3, "pair");
      expect_filled(all_reduce(own_number(100)), sum_of_numbers(), "world");
    }
  });
}

TEST_P(GroupsOnCuda, AreMadeAndEndedManyTimes) {
  run_on(GetParam(), [] {
    std::vector<int> everybody;
    for (int peer = 0; peer < world_size(); ++peer) everybody.push_back(peer);
    for (int turn = 0; turn < 3; ++turn) {
      const auto group = new_group(everybody);
      expect_filled(all_reduce(own_number(10), ReduceOp::SUM, group), sum_of_numbers(), "new");
    }
    shutdown();
    auto options = testing::rank_init_options();
    options.init_method += ".again";
    init(options);
    expect_filled(all_reduce(own_number(10)), sum_of_numbers(), "the next world");
  });
}

/// What collectives on the device end with, tried until one does; empty if none did in time.
std::string error_of_collectives(std::chrono::seconds most) {
  const auto end = std::chrono::steady_clock::now() + most;
  while (std::chrono::steady_clock::now() < end) {
    try {
      all_reduce(at::ones({4}, on())).cpu();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    std::this_thread::sleep_for(50ms);
  }
  return "";
}

/// The calls, or collectives after them, fail within seconds and name the rank.
template <class F>
void expect_failure_by(const std::string& rank, const F& calls) {
  const auto begun = std::chrono::steady_clock::now();
  std::string error;
  try {
    calls();
    error = error_of_collectives(15s);
  } catch (const c10::Error& caught) {
    error = caught.what_without_backtrace();
  }
  EXPECT_THAT(error, HasSubstr(rank));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 30s);
}

class PeerOnCuda : public ::testing::TestWithParam<std::string> {
 protected:
  static DeviceCase where(int ranks) {
    return {.device = at::kCUDA, .backend = GetParam(), .ranks = ranks};
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, PeerOnCuda, ::testing::Values("nccl", "shm", "gloo"),
                         [](const auto& instance) { return instance.param; });

TEST_P(PeerOnCuda, ThatIsKilledIsNamedWithinSeconds) {
  const auto body = [] {
    expect_filled(all_reduce(own_number(4)), sum_of_numbers(), "before");
    barrier();
    if (rank() == 1) raise(SIGKILL);
    EXPECT_THAT(error_of_collectives(15s), HasSubstr("rank 1"));
    // No stream waits for the dead any more.
    EXPECT_EQ(at::ones({4}, on()).sum().item<float>(), 4);
  };
  run_on(where(3), body, {.timeout = 60s, .may_die = {1}});
}

TEST_P(PeerOnCuda, ThatDiesWithCollectivesUnderWayFailsThemAll) {
  const auto body = [] {
    expect_filled(all_reduce(own_number(4)), sum_of_numbers(), "before");
    std::vector<Tensors> tensors;
    for (int i = 0; i < 10; ++i) tensors.push_back({own_number(i % 2 == 0 ? 10 : 1 << 20)});
    barrier();
    if (rank() == 1) raise(SIGKILL);
    std::vector<WorkPtr> works;
    expect_failure_by("rank 1", [&] {
      for (auto& each : tensors) works.push_back(default_group()->allreduce(each));
      for (const auto& work : works) work->wait();
      at::ones({1}, on()).item();  // the stream's end
    });
  };
  run_on(where(2), body, {.timeout = 60s, .may_die = {1}});
}

/// Of a graph's collectives c10d tells nothing: the graph itself is watched.
TEST_P(PeerOnCuda, ThatDiesWhileAGraphWaitsForItIsNamed) {
  if (GetParam() != "nccl") GTEST_SKIP() << "its collectives are not captured";
  const auto body = [] {
    const ConfigPatch patch({.capture_collectives = true});
    auto step = compile([](at::Tensor x) { return all_reduce(x * 2).square(); });
    auto x = own_number(1 << 10);
    for (int i = 0; i < 5; ++i) step(x);
    EXPECT_GT(counters()["cuda_graph_replays"], 0) << explain(step);
    barrier();
    // Before its graph is done, or at any moment of it.
    if (rank() == 1) {
      step(x);
      raise(SIGKILL);
    }
    expect_failure_by("rank 1", [&] {
      for (int i = 0; i < 3; ++i) step(x).cpu();
    });
  };
  run_on(where(2), body, {.timeout = 60s, .may_die = {1}});
}

TEST_P(PeerOnCuda, ThatIsStoppedIsNamedBeforeTheTimeout) {
  if (testing::gpu_count() == 0) GTEST_SKIP() << "no GPU: " << where(2).name() << " needs one";
  const auto body = [] {
    auto options = testing::rank_init_options();
    options.stopped_timeout = 3s;
    init(options);
    expect_filled(all_reduce(own_number(4)), sum_of_numbers(), "before");
    if (rank() == 1) {
      Beacon("ready").signal();
      EXPECT_TRUE(Beacon("released").wait(60s));
      return;
    }
    EXPECT_TRUE(Beacon("stopped").wait());
    EXPECT_THAT(error_of_collectives(30s), AllOf(HasSubstr("rank 1"), HasSubstr("stopped")));
  };
  testing::RankProcesses ranks(
      2, body,
      {.backend = GetParam(), .timeout = 60s, .may_die = {1}, .init = false, .device = at::kCUDA});
  EXPECT_TRUE(ranks.beacon("ready").wait(60s));
  ranks.stop(1);
  ranks.beacon("stopped").signal();
  ranks.wait(0, 60s);
  ranks.beacon("released").signal();
  ranks.kill(1);
  ranks.join();
}

/// A function of CUDA's runtime, which libtorch brings.
template <class... Args>
void call_runtime(const char* name, Args... args) {
  auto* function = reinterpret_cast<int (*)(Args...)>(dlsym(RTLD_DEFAULT, name));
  ASSERT_NE(function, nullptr) << name;
  ASSERT_EQ(function(args...), 0) << name;
}

// NCCL waits without an end for graphs that hold its communicator: a program that has not released
// them ends all the same, with a warning at most, and its exit code is its own.
TEST(ExitOnCuda, WithLiveGraphsIsCleanAndTakesSeconds) {
  const auto body = [] {
    void* graph = nullptr;
    void* program = nullptr;
    Tensors tensors{own_number(1 << 10)};
    const auto stream = side_stream();
    const c10::StreamGuard guard(stream);
    default_group()->allreduce(tensors)->wait();  // connects
    tensors[0].fill_(rank() + 1);
    stream.synchronize();
    call_runtime("cudaStreamBeginCapture", stream.native_handle(), /*thread-local*/ 1);
    default_group()->allreduce(tensors)->wait();
    call_runtime("cudaStreamEndCapture", stream.native_handle(), &graph);
    call_runtime("cudaGraphInstantiateWithFlags", &program, graph, 0ULL);
    call_runtime("cudaGraphLaunch", program, stream.native_handle());
    expect_filled(tensors[0], sum_of_numbers(), "replayed");
    call_runtime("cudaGraphLaunch", program, stream.native_handle());
    expect_filled(tensors[0], sum_of_numbers() * world_size(), "replayed again");
    const auto begun = std::chrono::steady_clock::now();
    shutdown();
    EXPECT_LT(std::chrono::steady_clock::now() - begun, 15s);
  };
  run_on({.device = at::kCUDA, .backend = "nccl", .ranks = 2}, body, {.fresh = true});
}

}  // namespace
}  // namespace tessera::collective_bodies
