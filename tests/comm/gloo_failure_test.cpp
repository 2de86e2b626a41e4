// How the gloo backend fails: what it says, what it refuses afterwards, and that it ends.
#include "comm/gloo_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

c10d::BarrierOptions within(std::chrono::milliseconds timeout) {
  c10d::BarrierOptions options;
  options.timeout = timeout;
  return options;
}

TEST(GlooBackendError, NamesTheRankThatNeverCame) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const auto join = [&] {
    gloo::make({.store = store,
                .rank = 0,
                .size = 2,
                .group_name = "dp",
                .world_ranks = {},
                .timeout = 200ms});
  };
  EXPECT_THAT(join, ThrowsMessage<c10::DistBackendError>(
                        AllOf(HasSubstr("gloo: group 'dp'"), HasSubstr("misses rank 1"))));
}

TEST(GlooBackendError, TellsWhatTimedOutAndRefusesWhatFollows) {
  std::promise<void> gave_up;
  run_gloo(
      2,
      [&, done = gave_up.get_future().share()](GroupBackend& group, int rank) {
        if (rank == 1) return done.wait();
        Tensors tensors{at::ones({4})};
        EXPECT_THAT([&] { group.allreduce(tensors)->wait(); },
                    ThrowsMessage<c10::DistBackendError>(
                        AllOf(HasSubstr("gloo: all_reduce #1 (4 float32, 16 B, sum) in group 'g' "
                                        "on rank 0: timed out after "),
                              HasSubstr(" of waiting for rank 1; raise the group's timeout"))));
        EXPECT_THAT([&] { group.broadcast(tensors); },
                    ThrowsMessage<c10::DistBackendError>(
                        HasSubstr("gloo: broadcast in group 'g' on rank 0: the group "
                                  "can't be used after an earlier error; end this rank, or shut "
                                  "down and init again. The error was: gloo: all_reduce #1 ")));
        gave_up.set_value();
      },
      300ms);
}

/// The signals that the threads of this process block, of those with `name` in theirs.
std::vector<uint64_t> blocked_by_threads(const std::string& name) {
  std::vector<uint64_t> blocked;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string own, field;
    std::getline(std::ifstream(thread.path() / "comm") >> std::ws, own);
    if (own.find(name) == std::string::npos) continue;
    std::ifstream status(thread.path() / "status");
    while (status >> field && field != "SigBlk:") {
    }
    uint64_t set = 0;
    status >> std::hex >> set;
    blocked.push_back(set);
  }
  return blocked;
}

// A peer that dies while gloo writes to it must not end this process, as SIGPIPE would.
TEST(GlooBackendError, IsNoSignal) {
  run_gloo(2, [](GroupBackend& group, int) {
    Tensors tensors{at::ones({4})};
    group.allreduce(tensors)->wait();
    const auto threads = blocked_by_threads("pt_gloo");
    EXPECT_GE(threads.size(), 2);  // of libtorch
    for (const auto set : threads) EXPECT_NE(set & (uint64_t{1} << (SIGPIPE - 1)), 0);
    tensors = {at::ones({4})};
    group.allreduce(tensors)->wait();
  });
}

TEST(GlooBackendError, LetsAWaitEndBeforeItsCollective) {
  std::promise<void> gave_up;
  run_gloo(2, [&, done = gave_up.get_future().share()](GroupBackend& group, int rank) {
    Tensors tensors{at::full({2}, 1, at::kHalf)};
    if (rank == 1) done.wait();
    auto work = group.allreduce(tensors);
    if (rank == 0) {
      EXPECT_THAT([&] { work->wait(30ms); },
                  ThrowsMessage<c10::DistBackendError>(
                      AllOf(HasSubstr("all_reduce #1"), HasSubstr("not complete"))));
      gave_up.set_value();
    }
    EXPECT_TRUE(work->wait());
    EXPECT_EQ(tensors[0][0].item<float>(), 2);
  });
}

TEST(GlooBackendError, EndsWithCollectivesUnderWay) {
  std::promise<void> ended;
  run_gloo(2, [&, done = ended.get_future().share()](GroupBackend& group, int rank) {
    Tensors tensors{at::ones({4})};
    if (rank == 1) return done.wait();
    auto collective = group.allreduce(tensors);
    auto letter = group.recv(tensors, 1, 0);
    EXPECT_FALSE(letter->isCompleted());
    group.abort();
    group.shutdown();
    EXPECT_THROW(collective->wait(), c10::DistBackendError);
    EXPECT_THROW(letter->wait(), c10::DistBackendError);
    EXPECT_THAT([&] { group.barrier(); },
                ThrowsMessage<c10::DistBackendError>(HasSubstr("barrier in group 'g'")));
    ended.set_value();
  });
}

TEST(GlooBackendError, NoticesAPeerThatLeft) {
  run_gloo(2, [](GroupBackend& group, int rank) {
    group.barrier()->wait();
    if (rank == 1) return group.abort();
    Tensors tensors{at::ones({4})};
    const auto reduce = [&] { group.allreduce(tensors)->wait(); };
    EXPECT_THAT(
        reduce,
        ThrowsMessage<c10::DistBackendError>(
            AllOf(HasSubstr("gloo: all_reduce #2 (4 float32, 16 B, sum) in group 'g' on rank 0: "),
                  HasSubstr("rank 1 has ended or its connection broke; its own output"))));
    EXPECT_THAT(reduce, ThrowsMessage<c10::DistBackendError>(
                            HasSubstr("init again. The error was: gloo: all_reduce #2")));
    EXPECT_EQ(group.getError(), c10d::ErrorType::COMM_ERROR);
  });
}

TEST(GlooBackendError, NamesWhoMissesAMonitoredBarrier) {
  run_gloo(3, [](GroupBackend& group, int rank) {
    group.monitoredBarrier(within(10s), true);
    if (rank == 2) return group.barrier()->wait(), void();
    EXPECT_THAT([&] { group.monitoredBarrier(within(200ms), true); },
                ThrowsMessage<c10::DistBackendError>(
                    AllOf(HasSubstr("gloo: monitored_barrier #2 in group 'g' on rank "),
                          HasSubstr("misses rank 2"))));
    group.barrier()->wait();
  });
}

/// The store of a rank that is slow to connect: it reads nothing of its peer before that one has
/// left, or waits for it.
class SlowStore final : public c10d::PrefixStore {
 public:
  SlowStore(c10::intrusive_ptr<c10d::Store> store, std::shared_future<void> peer)
      : PrefixStore("group", std::move(store)), peer_(std::move(peer)) {}

  std::vector<uint8_t> get(const std::string& key) override {
    linger({key});
    return PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    linger(keys);
    return PrefixStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    linger(keys);
    PrefixStore::wait(keys, timeout);
  }

 private:
  void linger(const std::vector<std::string>& keys) {
    if (keys[0].starts_with("gloo/")) return;  // ours
    peer_.wait_for(500ms);  // one of two ranks connects; this one may be it, and waited for
  }
  std::shared_future<void> peer_;
};

TEST(GlooBackendError, IsNotCausedByAPeerThatLeavesAtOnce) {
  for (const int slow : {0, 1}) {
    SCOPED_TRACE(slow);
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::promise<void> left;
    const auto join = [&, gone = left.get_future().share()](int rank) {
      BackendRequest request{.store = c10::make_intrusive<c10d::PrefixStore>("group", store),
                             .rank = rank,
                             .size = 2,
                             .group_name = "g",
                             .world_ranks = {},
                             .timeout = 20s};
      if (rank == slow) request.store = c10::make_intrusive<SlowStore>(store, gone);
      EXPECT_NO_THROW(gloo::make(request)) << rank;
      if (rank != slow) left.set_value();
    };
    std::thread other(join, 1);
    join(0);
    other.join();
  }
}

}  // namespace
}  // namespace tessera::comm
