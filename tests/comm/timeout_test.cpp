#include "comm/collective_cases.h"
#include "comm/errors_of_calls.h"
#include "support/forked_ranks.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <time.h>

#include <functional>

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using testing::Beacon;
using ::testing::ContainsRegex;
using testing::ForkedWorld;
using ::testing::HasSubstr;
using testing::run_forked_worlds;
using testing::run_processes;
using testing::run_threads;

constexpr auto kShort = 400ms;

void live_with_a_stop(const CollectiveCase& collective, Phase phase) {
  const int victim = collective.victim;
  barrier();
  call_all_reduce(sample(rank(), kSmall));
  default_group()->getBackend(at::kCPU)->setTimeout(kShort);
  if (rank() == victim) set_trap(collective, phase, 3, SIGSTOP);
  int calls = 0;
  const auto error = first_error_of(collective.call, &calls);
  EXPECT_TRUE(calls == 0 || !must_fail(collective, phase, rank()))
      << "got a result without the stopped rank's part";
  EXPECT_THAT(error,
              AllOf(HasSubstr("timed out after "), HasSubstr(" in group 'world' on rank "),
                    AnyOf(HasSubstr(collective.operation + " #3"), HasSubstr("barrier #4"))));
  if (rank() == victim) {  // resumed: all others have given up and ended
    EXPECT_THAT(error, HasSubstr(" has failed: shm: "));
    return;
  }
  const auto who = std::to_string(victim);
  const auto is_missing =
      AllOf(ContainsRegex("; missing: [^;]*" + who),
            HasSubstr("; rank " + who + "'s last was " + collective.operation + " #3"));
  EXPECT_THAT(error,
              AnyOf(is_missing, HasSubstr("; missing: none; furthest behind in it: " + who + ";")));
}

class StoppedPeer : public ::testing::TestWithParam<CollectiveCase> {};

TEST_P(StoppedPeer, InAnyPhaseTimesOutAndFailsWhenResumed) {
  const auto& collective = GetParam();
  std::vector<ForkedWorld> worlds;
  for (const Phase phase : phases_of(collective)) {
    worlds.push_back({.name = name_of(phase), .ranks = collective.ranks, .body = [&, phase] {
                        live_with_a_stop(collective, phase);
                      }});
  }
  run_forked_worlds(worlds, /*at_once=*/5);
}

INSTANTIATE_TEST_SUITE_P(Collectives, StoppedPeer, ::testing::ValuesIn(collective_cases()),
                         [](const auto& instance) { return instance.param.name; });

TEST(Timeout, IsFiveMinutesByDefault) {
  EXPECT_EQ(kDefaultTimeout, 5min);
  EXPECT_EQ(InitOptions().timeout, 5min);
  run_threads(1, [] {
    shutdown();
    auto options = testing::rank_init_options();
    options.timeout = InitOptions().timeout;
    init(options);
    EXPECT_EQ(default_group()->getBackend(at::kCPU)->getBackendOptions()->timeout, 5min);
    const auto group = new_group({0}, {.timeout = 7s});
    EXPECT_EQ(group->getBackend(at::kCPU)->getBackendOptions()->timeout, 7s);
  });
}

/// A call that rank 1 never answers, with the text its error must have.
struct Unanswered {
  const char* what;
  std::function<void(const Group&)> call;
  const char* text;
};

TEST(Timeout, CanBeShortenedPerGroupPerCallAndPerWait) {
  const std::vector<Unanswered> calls = {
      {"the group's", [](const Group& group) { barrier(group); }, "barrier #1 in group 'short: "},
      {"the call's",
       [](const Group& group) {
         Tensors tensors{sample(0, kSmall)};
         c10d::AllreduceOptions options;
         options.timeout = kShort;
         group->allreduce(tensors, options)->wait();
       },
       "all_reduce #1 (Float, 400 B, sum)"},
      {"the wait's",
       [](const Group& group) {
         Tensors tensors{sample(0, kLarge)};
         group->allreduce(tensors)->wait(kShort);
       },
       "all_reduce #1 (Float, 1 MiB, sum)"},
      {"the wait's, while another thread works on it",
       [](const Group& group) {
         Tensors tensors{sample(0, kLarge)};
         const auto work = group->allreduce(tensors);
         const auto future = work->getFuture();
         work->wait(kShort);
       },
       "in group 'long: "},
      {"a receive's",
       [](const Group& group) {
         Tensors tensors{sample(0, kSmall)};
         group->recv(tensors, 1, 7)->wait(kShort);
       },
       "recv #1 (Float, 400 B, from 1)"},
      {"the monitored barrier's", [](const Group& group) { monitored_barrier(group, kShort); },
       "monitored_barrier #1"},
      {"the group's, for a monitored barrier", [](const Group& group) { monitored_barrier(group); },
       "monitored_barrier #1 in group 'short: "},
  };
  run_threads(2, [&] {
    std::vector<Group> groups;
    for (const auto& [what, call, text] : calls) {
      const bool is_short = std::string(what).starts_with("the group's");
      groups.push_back(new_group({0, 1}, {.timeout = is_short ? kShort : 30000ms,
                                          .description = is_short ? "short" : "long"}));
    }
    for (size_t i = 0; i < calls.size() && rank() == 0; ++i) {
      SCOPED_TRACE(calls[i].what);
      const auto begun = Clock::now();
      EXPECT_THAT(
          error_of([&] { calls[i].call(groups[i]); }),
          AllOf(HasSubstr(calls[i].text),
                AnyOf(HasSubstr("timed out after "), HasSubstr("did not complete within 400 ms"))));
      EXPECT_GE(Clock::now() - begun, kShort - 10ms);
      EXPECT_LT(Clock::now() - begun, 10s);
    }
    if (rank() == 0) Beacon("done").signal();
    EXPECT_TRUE(Beacon("done").wait());
  });
}

class MonitoredBarrier : public ::testing::TestWithParam<std::string> {};

TEST_P(MonitoredBarrier, NamesAllThatAreMissingOnEveryRankThatCame) {
  run_threads(4,
              [] {
                monitored_barrier();
                const bool comes = rank() % 2 == 0;
                if (comes) {
                  EXPECT_THAT(error_of([] { monitored_barrier({}, 1000ms); }),
                              AllOf(HasSubstr("monitored_barrier"), HasSubstr("in group 'world'"),
                                    HasSubstr("1 and 3")));
                  Beacon("done." + std::to_string(rank())).signal();
                }
                EXPECT_TRUE(Beacon("done.0").wait());
                EXPECT_TRUE(Beacon("done.2").wait());
              },
              {.backend = GetParam()});
}

INSTANTIATE_TEST_SUITE_P(Backends, MonitoredBarrier, ::testing::Values("shm", "gloo"),
                         [](const auto& instance) { return instance.param; });

TEST(Timeout, TellsTheLastCollectiveOfThoseThatAreMissing) {
  run_threads(3, [] {
    const auto group = new_group({0, 1, 2}, {.timeout = kShort});
    if (rank() == 0) {
      EXPECT_THAT(
          error_of([&] { barrier(group); }),
          AllOf(
              HasSubstr("timed out after "),
              HasSubstr(" of waiting for rank 1; arrived: 0; missing: 1 and 2"),
              HasSubstr(
                  "; rank 1's last was none; rank 2's last was none; raise the group's timeout")));
      Beacon("done").signal();
    }
    EXPECT_TRUE(Beacon("done").wait());
  });
}

TEST(Timeout, OfASendInPlaceKeepsTheReceiverFromWhatChangedSince) {
  run_threads(2, [] {
    const auto group = new_group({0, 1});
    auto tensor = shared_sample(0, kLarge);
    Tensors tensors{tensor};
    if (rank() == 0) {
      EXPECT_THAT(error_of([&] { group->send(tensors, 1, 0)->wait(kShort); }),
                  HasSubstr("send #1 (Float, 1 MiB, to 1)"));
      tensor.fill_(-1);
      Beacon("changed").signal();
      return;
    }
    EXPECT_TRUE(Beacon("changed").wait());
    EXPECT_THAT(error_of([&] { group->recv(tensors, 0, 0)->wait(); }),
                AllOf(HasSubstr("recv #1"), HasSubstr("rank 0 has failed: shm: send #1")));
  });
}

std::chrono::nanoseconds processor_time() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

TEST(WaitingForAPeer, UsesHardlyAnyProcessor) {
  run_processes(2, [] {
    barrier();
    if (rank() == 1) {
      EXPECT_FALSE(
          Beacon("never").wait(5s));  // the peer is late; how the other waits is what is tested
      Tensors message{sample(1, kSmall)};
      default_group()->send(message, 0, 0)->wait();
      barrier();
      return;
    }
    Tensors message{at::zeros({kSmall})};
    const auto receive = default_group()->recv(message, 1, 0);
    const auto future = receive->getFuture();  // a thread of the group waits for it
    const auto begun = Clock::now();
    const auto used = processor_time();
    barrier();
    const auto share =
        std::chrono::duration<double>(processor_time() - used) / (Clock::now() - begun);
    EXPECT_GE(Clock::now() - begun, 4500ms);
    EXPECT_LT(share, 0.05);
    future->wait();
    expect_same(message[0], sample(1, kSmall));
  });
}

}  // namespace
}  // namespace tessera::comm::shm
