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
    EXPECT_THAT(error, HasSubstr(" has failed: timed out after "));
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

/// A group with a short timeout that took its time to come together.
Group make_impatient_group(const std::vector<int>& ranks) {
  auto group = new_group(ranks);
  group->getBackend(at::kCPU)->setTimeout(kShort);
  return group;
}

/// A call that rank 1 never answers, with the text its error must have.
struct Unanswered {
  const char* what;
  std::function<void(const Group&)> call;
  const char* text;
};

/// Runs each in a group of its own; `call` of rank 0 must fail in due time.
void expect_timeouts(const std::vector<Unanswered>& calls, bool in_impatient_group) {
  run_threads(2, [&] {
    std::vector<Group> groups;
    for (size_t i = 0; i < calls.size(); ++i) {
      groups.push_back(in_impatient_group ? make_impatient_group({0, 1}) : new_group({0, 1}));
    }
    for (size_t i = 0; i < calls.size() && rank() == 0; ++i) {
      SCOPED_TRACE(calls[i].what);
      const auto begun = Clock::now();
      EXPECT_THAT(error_of([&] { calls[i].call(groups[i]); }), HasSubstr(calls[i].text));
      EXPECT_GE(Clock::now() - begun, kShort - 10ms);
      EXPECT_LT(Clock::now() - begun, 10s);
    }
    if (rank() == 0) Beacon("done").signal();
    EXPECT_TRUE(Beacon("done").wait());
  });
}

void call_with_timeout(const Group& group) {
  Tensors tensors{sample(0, kSmall)};
  c10d::AllreduceOptions options;
  options.timeout = kShort;
  group->allreduce(tensors, options)->wait();
}
void call_receive(const Group& group) {
  Tensors tensors{sample(0, kSmall)};
  group->recv(tensors, 1, 7)->wait();
}

TEST(Timeout, OfAGroupHoldsForAllItsCalls) {
  expect_timeouts(
      {
          {"a barrier", [](const Group& group) { barrier(group); },
           "shm: barrier #1 in group 'ranks 0,1' on rank 0: timed out after 4"},
          {"a receive", call_receive, "on rank 0: timed out after 4"},
          {"a monitored barrier", [](const Group& group) { monitored_barrier(group); },
           "shm: monitored_barrier #1 in group 'ranks 0,1 #3' on rank 0: timed out after 4"},
      },
      /*in_impatient_group=*/true);
}

TEST(Timeout, OfACallCanBeShorterThanTheGroups) {
  expect_timeouts(
      {
          {"an all_reduce", call_with_timeout,
           "shm: all_reduce #1 (100 float32, 400 B, sum) in group 'ranks 0,1' on rank 0: timed "
           "out"},
          {"a monitored barrier", [](const Group& group) { monitored_barrier(group, kShort); },
           "shm: monitored_barrier #1 in group 'ranks 0,1 #2' on rank 0: timed out after 4"},
      },
      /*in_impatient_group=*/false);
}

TEST(Timeout, OfAWaitLeavesTheCollectiveUnderWay) {
  run_threads(2, [] {
    Tensors sums{sample(rank(), kLarge)};
    Tensors letter{rank() == 0 ? at::zeros({kSmall}) : sample(1, kSmall)};
    EXPECT_TRUE(rank() == 0 || Beacon("given up").wait());
    const auto sum = default_group()->allreduce(sums);
    const auto message =
        rank() == 0 ? default_group()->recv(letter, 1, 0) : default_group()->send(letter, 0, 0);
    if (rank() == 0) {
      EXPECT_THAT(error_of([&] { sum->wait(kShort); }),
                  AllOf(HasSubstr("shm: wait: all_reduce"), HasSubstr(" in group 'world'"),
                        HasSubstr("not complete after 400 ms; it is still under way")));
      EXPECT_THAT(
          error_of([&] { message->wait(kShort); }),
          AllOf(HasSubstr("shm: wait: recv #1 (100 float32, 400 B, from 1) in group 'world'"),
                HasSubstr("not complete after 400 ms; it is still under way")));
      Beacon("given up").signal();
    }
    sum->wait();
    message->wait();
    expect_same(sums[0], sample(0, kLarge) + sample(1, kLarge));
    expect_same(letter[0], sample(1, kSmall));
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
    const auto group = make_impatient_group({0, 1, 2});
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
    const auto group = make_impatient_group({0, 1});
    auto tensor = shared_sample(0, kLarge);
    Tensors tensors{tensor};
    if (rank() == 0) {
      EXPECT_THAT(error_of([&] { group->send(tensors, 1, 0)->wait(); }),
                  HasSubstr("send #1 (262144 float32, 1 MiB, to 1)"));
      tensor.fill_(-1);
      Beacon("changed").signal();
      return;
    }
    EXPECT_TRUE(Beacon("changed").wait());
    EXPECT_THAT(error_of([&] { group->recv(tensors, 0, 0)->wait(); }),
                AllOf(HasSubstr("recv #1"), HasSubstr("rank 0 has failed: timed out after ")));
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
