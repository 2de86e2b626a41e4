#include "comm/collective_cases.h"
#include "comm/errors_of_calls.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using testing::Beacon;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::RankProcesses;
using testing::run_threads;

/// Sends the signal, again and again, until the rank has printed `text` `times`; what it printed.
std::string ask(RankProcesses& processes, int rank, int signal, const std::string& text,
                int times = 1) {
  const auto deadline = Clock::now() + 20s;
  std::string output;
  while (Clock::now() < deadline) {
    processes.signal(rank, signal);
    poll(nullptr, 0, /*milliseconds=*/10);  // until the next look
    output = processes.output(rank);
    size_t at = 0;
    int found = 0;
    while ((at = output.find(text, at)) != std::string::npos) ++found, ++at;
    if (found >= times) break;
  }
  return output;
}

TEST(RecentCollectives, TellWhatRanAndWhatWaits) {
  run_threads(2, [] {
    barrier();
    call_all_reduce(sample(rank(), kSmall));
    if (rank() == 0) {
      Tensors letter{at::zeros({2})};
      const auto receive = default_group()->recv(letter, 1, 0);
      Tensors tensors{sample(0, kSmall)};
      const auto waiting = default_group()->allreduce(tensors);
      EXPECT_THAT(
          recent_collectives(),
          AllOf(HasSubstr("tessera: recent collectives of rank 0 in group 'world':\n"),
                ContainsRegex("  barrier #1: done, issued [0-9.]+ m?s ago, took [0-9.e+]+ us\n"),
                ContainsRegex("  all_reduce #2 \\(100 float32, 400 B, sum\\): done, "),
                ContainsRegex("  recv #1 \\(2 float32, 8 B, from 1\\): running, "),
                ContainsRegex("  all_reduce.* \\(100 float32, 400 B, sum\\): queued, ")));
      Beacon("looked").signal();
      waiting->wait();
      receive->wait();
      EXPECT_THAT(recent_collectives(),
                  AllOf(HasSubstr("  recv #1 (2 float32, 8 B, from 1): done"),
                        HasSubstr("  all_reduce #3 (100 float32, 400 B, sum): done")));
      return;
    }
    EXPECT_TRUE(Beacon("looked").wait());
    call_all_reduce(sample(1, kSmall));
    Tensors letter{at::ones({2})};
    default_group()->send(letter, 0, 0)->wait();
  });
}

TEST(RecentCollectives, KeepTheLastOnesOfEveryGroup) {
  run_threads(2, [] {
    EXPECT_THAT(recent_collectives(), Not(HasSubstr("#")));
    const auto group = new_group({0, 1}, {.description = "other"});
    Tensors letter{at::zeros({1})};
    const auto receive =
        default_group()->recv(letter, 1 - rank(), 0);  // soon pushed out of the record
    for (int i = 0; i < 100; ++i) barrier();
    barrier(group);
    Tensors answer{at::ones({1})};
    default_group()->send(answer, 1 - rank(), 0)->wait();
    receive->wait();
    const auto text = recent_collectives();
    EXPECT_THAT(text, AllOf(HasSubstr("  barrier #100: done"), Not(HasSubstr("  barrier #50: ")),
                            Not(HasSubstr("recv"))));
    EXPECT_THAT(text, HasSubstr(" in group 'other: ranks 0,1':\n  barrier #1: done"));
    EXPECT_EQ(text.find("running"), std::string::npos);
  });
}

TEST(RecentCollectives, AreNotThereBeforeInit) {
  EXPECT_THAT(recent_collectives(), HasSubstr("not initialised"));
}

TEST(RecordOnError, IsPrintedWithTheErrorOnce) {
  RankProcesses processes(2,
                          [] {
                            call_all_reduce(sample(rank(), kSmall));
                            if (rank() == 1) raise(SIGKILL);
                            EXPECT_THAT(error_of([] { barrier(); }),
                                        HasSubstr("shm: barrier #2 in group 'world' on rank 0: "
                                                  "rank 1 (process "));
                            EXPECT_NE(error_of([] { barrier(); }), "");
                          },
                          {.may_die = {1}});
  processes.join();
  const auto output = processes.output(0);
  EXPECT_THAT(output, AllOf(HasSubstr("tessera: recent collectives of rank 0 in group 'world':"),
                            HasSubstr("  all_reduce #1 (100 float32, 400 B, sum): done, "),
                            HasSubstr("  barrier #2: running, ")));
  EXPECT_EQ(output.find("tessera: recent"), output.rfind("tessera: recent"));
}

TEST(RecordOnSignal, IsWrittenWhileTheRankHangs) {
  RankProcesses processes(2, [] {
    barrier();
    Beacon("begun." + std::to_string(rank())).signal();
    EXPECT_TRUE(rank() == 0 || Beacon("go").wait());
    call_all_reduce(sample(rank(), kLarge));
  });
  ASSERT_TRUE(processes.beacon("begun.0").wait());
  const std::string waiting = "  all_reduce #2 (262144 float32, 1 MiB, sum): running, issued ";
  EXPECT_THAT(ask(processes, 0, SIGUSR2, waiting, /*times=*/2),
              AllOf(HasSubstr("tessera: recent collectives of rank 0 in group 'world':"),
                    HasSubstr("  barrier #1: done"), HasSubstr(waiting)));
  processes.beacon("go").signal();
  processes.join();
}

TEST(RecordOnSignal, CanHaveAnotherSignalOrNone) {
  RankProcesses processes(1,
                          [] {
                            auto options = testing::rank_init_options();
                            options.dump_signal = SIGHUP;
                            init(options);
                            struct sigaction action{};
                            sigaction(SIGUSR2, nullptr, &action);
                            EXPECT_EQ(action.sa_handler, SIG_DFL);
                            barrier();
                            Beacon("begun").signal();
                            EXPECT_TRUE(Beacon("go").wait());
                            shutdown();
                            options.dump_signal = 12345;
                            EXPECT_THROW(init(options), c10::ValueError);
                          },
                          {.init = false});
  ASSERT_TRUE(processes.beacon("begun").wait());
  EXPECT_THAT(ask(processes, 0, SIGHUP, "barrier #1: done"),
              HasSubstr("recent collectives of rank 0"));
  processes.beacon("go").signal();
  processes.join();
}

volatile sig_atomic_t handled = 0;

TEST(RecordOnSignal, LeavesTheProgramsOwnHandlerAlone) {
  testing::run_processes(1,
                         [] {
                           struct sigaction own{};
                           own.sa_handler = [](int) { handled = 1; };
                           sigaction(SIGUSR2, &own, nullptr);
                           init(testing::rank_init_options());
                           raise(SIGUSR2);
                           EXPECT_EQ(handled, 1);
                           struct sigaction present{};
                           sigaction(SIGUSR2, nullptr, &present);
                           EXPECT_EQ(present.sa_handler, own.sa_handler);
                         },
                         {.init = false});
}

}  // namespace
}  // namespace tessera::comm::shm
