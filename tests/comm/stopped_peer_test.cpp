// A peer that is stopped: told early, named in the error, and not waited for as long as others.
#include "comm/errors_of_calls.h"
#include "comm/peer_process.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/variables.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using testing::Beacon;
using ::testing::HasSubstr;
using testing::RankProcesses;

class PeerThatIsStopped : public ::testing::TestWithParam<std::string> {};

TEST_P(PeerThatIsStopped, IsNamedBeforeTheTimeout) {
  const auto body = [] {
    auto options = testing::rank_init_options();
    options.stopped_timeout = 3s;
    init(options);
    barrier();
    if (rank() == 1) {
      Beacon("ready").signal();
      EXPECT_TRUE(Beacon("released").wait(60s));
      return;
    }
    EXPECT_TRUE(Beacon("stopped").wait());
    const auto begun = std::chrono::steady_clock::now();
    const auto is_named = AllOf(HasSubstr("rank 1 (process "), HasSubstr(" has been stopped for "),
                                HasSubstr("kill -CONT "));
    EXPECT_THAT(error_of([] { all_reduce(at::ones({4})); }), is_named);
    EXPECT_THAT(error_of([] { new_group({0, 1}, {.timeout = 60s}); }), is_named);
    EXPECT_LT(std::chrono::steady_clock::now() - begun, 30s);
  };
  RankProcesses ranks(2, body,
                      {.backend = GetParam(), .timeout = 60s, .may_die = {1}, .init = false});
  EXPECT_TRUE(ranks.beacon("ready").wait());
  ranks.stop(1);
  ranks.beacon("stopped").signal();
  ranks.wait(0, 60s);
  ranks.beacon("released").signal();
  ranks.kill(1);
  EXPECT_THAT(ranks.output(0), HasSubstr(") is stopped (SIGSTOP or a debugger); rank 0 waits"));
  ranks.join();
}

INSTANTIATE_TEST_SUITE_P(Backends, PeerThatIsStopped, ::testing::Values("shm", "gloo"),
                         [](const auto& instance) { return instance.param; });

class PeerThatIsLate : public ::testing::TestWithParam<std::string> {};

TEST_P(PeerThatIsLate, IsNamedOnceByOneRankWhileItIsAwaited) {
  const testing::Variables late({std::pair("TESSERA_LATE_AFTER", "1")});
  RankProcesses ranks(3,
                      [] {
                        barrier();
                        if (rank() == 1) std::this_thread::sleep_for(5s);
                        all_reduce(at::ones({4}));
                        if (rank() != 1) std::this_thread::sleep_for(5s);
                        EXPECT_TRUE(new_group({0, 1, 2}));
                      },
                      {.backend = GetParam(), .timeout = 60s});
  ranks.join();
  const auto count = [](const std::string& text, const std::string& part) {
    int times = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
      ++times;
    return times;
  };
  const auto output = ranks.output(0);
  EXPECT_THAT(output,
              AllOf(HasSubstr("tessera: rank 0 has waited "), HasSubstr(" for rank 1: all_"),
                    HasSubstr("in group 'world'"), HasSubstr("; it gives up after ")));
  EXPECT_EQ(count(output, " for rank 1: all_reduce"), 1) << output;
  const int by_others = GetParam() == "shm" ? 0 : 1;  // gloo's ranks do not see who else waits
  EXPECT_EQ(count(ranks.output(2), " for rank 1: all_reduce"), by_others) << ranks.output(2);
  EXPECT_THAT(ranks.output(1), HasSubstr("tessera: rank 1 has waited "));
}

INSTANTIATE_TEST_SUITE_P(Backends, PeerThatIsLate, ::testing::Values("shm", "gloo"),
                         [](const auto& instance) { return instance.param; });

TEST(PeerThatIsLate, IsNamedOncePerMessageAwaited) {
  const testing::Variables late({std::pair("TESSERA_LATE_AFTER", "1")});
  RankProcesses ranks(2, [] {
    at::Tensor boxes[] = {at::zeros({4}), at::zeros({4})};
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    const auto backend = default_group()->getBackend(at::kCPU);
    if (rank() == 1) std::this_thread::sleep_for(4s);
    for (int tag = 0; tag < 2; ++tag) {
      std::vector<at::Tensor> box{boxes[tag]};
      works.push_back(rank() == 0 ? backend->recv(box, 1, tag) : backend->send(box, 0, tag));
    }
    for (const auto& work : works) work->wait();
  });
  ranks.join();
  const auto output = ranks.output(0);
  const auto first = output.find(" for rank 1: recv");
  EXPECT_NE(first, std::string::npos) << output;
  int lines = 0;
  for (size_t at = first; at != std::string::npos; at = output.find(" for rank 1: recv", at + 1))
    ++lines;
  EXPECT_LE(lines, 2) << output;
}

TEST(PeerThatIsLateErrors, TimesThatAreNoNumbersAreRefusedAtOnce) {
  const testing::Variables late({std::pair("TESSERA_LATE_AFTER", "30s")});
  testing::run_processes(
      1,
      [] {
        EXPECT_THAT(testing::message_of<c10::Error>([] { init(testing::rank_init_options()); }),
                    AllOf(HasSubstr("TESSERA_LATE_AFTER"), HasSubstr("30s")));
      },
      {.init = false});
}

TEST(PeerProcess, SeesThatAProcessIsStoppedAndGoesOn) {
  const pid_t child = fork();
  if (child == 0) {
    while (true) pause();
  }
  const auto peer = PeerProcess::watch(child);
  EXPECT_FALSE(peer->stopped_for());
  kill(child, SIGSTOP);
  while (!peer->stopped_for()) std::this_thread::sleep_for(20ms);
  set_stopped_timeout(0ms);
  EXPECT_FALSE(peer->find_stop("rank 1", ""));
  set_stopped_timeout(1ms);
  std::this_thread::sleep_for(5ms);
  EXPECT_THAT(peer->find_stop("rank 1", "").value_or(""),
              HasSubstr("rank 1 (process " + std::to_string(child) + ") has been stopped for "));
  set_stopped_timeout(30s);
  kill(child, SIGCONT);
  while (peer->stopped_for()) std::this_thread::sleep_for(20ms);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace tessera::comm
