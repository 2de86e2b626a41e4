#include "comm/collective_cases.h"
#include "comm/errors_of_calls.h"
#include "support/forked_ranks.h"

#include <gmock/gmock.h>
#include <signal.h>

#include <functional>

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using testing::ForkedWorld;
using ::testing::HasSubstr;
using testing::run_forked_worlds;

void live_with_death(const CollectiveCase& collective, Phase phase) {
  barrier();
  call_all_reduce(sample(rank(), kSmall));
  if (rank() == collective.victim) set_trap(collective, phase, 3, SIGKILL);
  int calls = 0;
  const auto error = first_error_of(collective.call, &calls);
  EXPECT_NE(rank(), collective.victim) << "was to die";
  EXPECT_TRUE(calls == 0 || !must_fail(collective, phase, rank()))
      << "got a result without the dead rank's part";
  const auto victim = "rank " + std::to_string(collective.victim) + " (process ";
  EXPECT_THAT(error,
              AllOf(HasSubstr(victim), HasSubstr(") died"), HasSubstr("in group 'world' on rank "),
                    AnyOf(HasSubstr(collective.operation + " #3"), HasSubstr("barrier #4"))));
}

class PeerDeath : public ::testing::TestWithParam<CollectiveCase> {};

TEST_P(PeerDeath, InAnyPhaseIsAnErrorThatNamesTheDead) {
  const auto& collective = GetParam();
  std::vector<ForkedWorld> worlds;
  for (const Phase phase : phases_of(collective)) {
    worlds.push_back({.name = name_of(phase),
                      .ranks = collective.ranks,
                      .body = [&, phase] { live_with_death(collective, phase); },
                      .may_die = {collective.victim}});
  }
  run_forked_worlds(worlds);
}

INSTANTIATE_TEST_SUITE_P(Collectives, PeerDeath, ::testing::ValuesIn(collective_cases()),
                         [](const auto& instance) { return instance.param.name; });

c10::intrusive_ptr<c10d::Work> receive(at::Tensor tensor, int source) {
  Tensors tensors{std::move(tensor)};
  return default_group()->recv(tensors, source, 0);
}
c10::intrusive_ptr<c10d::Work> send(at::Tensor tensor, int destination) {
  Tensors tensors{std::move(tensor)};
  return default_group()->send(tensors, destination, 0);
}

void wait_for_message_of_the_dead() {
  barrier();
  if (rank() == 1) raise(SIGKILL);
  if (rank() == 2) return;
  EXPECT_THAT(error_of([] { receive(at::zeros({4}), 1)->wait(); }),
              AllOf(HasSubstr("shm: recv #1 (4 float32, 16 B, from 1) in group 'world' on rank 0: "
                              "rank 1 (process "),
                    HasSubstr(") died")));
}

void receive_what_the_dead_had_sent() {
  if (rank() == 1) {
    send(sample(1, kSmall), 0)->wait();
    raise(SIGKILL);
  }
  auto tensor = at::zeros({kSmall});
  receive(tensor, 1)->wait();
  expect_same(tensor, sample(1, kSmall));
}

void send_in_place_to_the_dead() {
  barrier();
  if (rank() == 1) raise(SIGKILL);
  EXPECT_THAT(error_of([] { send(shared_sample(0, kLarge), 1)->wait(); }),
              AllOf(HasSubstr("send #1 (262144 float32, 1 MiB, to 1)"),
                    HasSubstr("rank 1 (process "), HasSubstr(") died")));
}

void fill_the_outbox_to_the_dead() {
  barrier();
  if (rank() == 1) raise(SIGKILL);
  const auto error = error_of([] {
    for (size_t message = 0; message <= kP2PEntries; ++message) send(sample(0, kSmall), 1)->wait();
  });
  EXPECT_THAT(error, AllOf(HasSubstr("send #17"), HasSubstr(") died")));
}

void receive_from_anybody() {
  barrier();
  if (rank() == 1) raise(SIGKILL);
  const auto error = error_of([] {
    Tensors tensors{at::zeros({4})};
    default_group()->recvAnysource(tensors, 0)->wait();
  });
  EXPECT_THAT(error, AllOf(HasSubstr("recv #1"), HasSubstr("rank 1"), HasSubstr(") died")));
}

TEST(PeerDeathByMessage, IsNoticedByThoseWhoNeedTheDead) {
  run_forked_worlds({
      {.name = "Receive", .ranks = 3, .body = wait_for_message_of_the_dead, .may_die = {1}},
      {.name = "Sent", .body = receive_what_the_dead_had_sent, .may_die = {1}},
      {.name = "SendInPlace", .body = send_in_place_to_the_dead, .may_die = {1}},
      {.name = "FullOutbox", .body = fill_the_outbox_to_the_dead, .may_die = {1}},
      {.name = "AnySource", .body = receive_from_anybody, .may_die = {1}},
  });
}

void wait_on_a_worker_thread() {
  barrier();
  if (rank() == 1) raise(SIGKILL);
  Tensors tensors{sample(0, kLarge)};
  const auto work = default_group()->allreduce(tensors);
  const auto future = work->getFuture();
  future->wait();
  EXPECT_TRUE(future->hasError());
  EXPECT_THAT(error_of([&] { work->wait(); }), HasSubstr(") died"));
  EXPECT_TRUE(work->isCompleted());
  EXPECT_FALSE(work->isSuccess());
}

void fail_everything_in_flight() {
  std::vector<Tensors> tensors;  // made first: all calls must be issued before the death is noticed
  for (int i = 0; i < 20; ++i) tensors.push_back({sample(0, i % 2 == 0 ? kSmall : kLarge)});
  barrier();
  if (rank() == 1) raise(SIGKILL);
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (auto& each : tensors) works.push_back(default_group()->allreduce(each));
  EXPECT_THAT(error_of([&] { works.back()->wait(); }), HasSubstr(") died"));
  for (const auto& work : works) EXPECT_THAT(error_of([&] { work->wait(); }), HasSubstr(") died"));
}

void go_on_without_the_dead() {
  barrier();
  if (rank() == 1) raise(SIGKILL);
  EXPECT_THAT(error_of([] { barrier(); }), HasSubstr(") died"));
  EXPECT_THAT(error_of([] { call_all_reduce(sample(rank(), kSmall)); }),
              AllOf(HasSubstr("shm: all_reduce in group 'world'"),
                    HasSubstr("can't be used after an earlier error"),
                    HasSubstr("rank 1 (process "), HasSubstr("shut down and init again")));
  const auto survivors = new_group({0, 2}, {.description = "survivors"});
  Tensors tensors{sample(rank(), kLarge)};
  survivors->allreduce(tensors)->wait();
  expect_same(tensors[0], sample(0, kLarge) + sample(2, kLarge));
}

TEST(PeerDeathAnywhere, EndsWhatIsUnderWayAndPoisonsThisGroupOnly) {
  run_forked_worlds({
      {.name = "Worker", .body = wait_on_a_worker_thread, .may_die = {1}},
      {.name = "InFlight", .body = fail_everything_in_flight, .may_die = {1}},
      {.name = "Survivors", .ranks = 3, .body = go_on_without_the_dead, .may_die = {1}},
  });
}

/// What ranks 0 and 2 hear of rank 1, which ended without taking part.
void expect_left() {
  const auto error = first_error_of([] { call_all_reduce(sample(rank(), kSmall)); });
  EXPECT_THAT(error, AllOf(HasSubstr("all_reduce #2"), HasSubstr("in group 'world'"),
                           HasSubstr("rank 1 has left the group without taking part")));
  EXPECT_THAT(error, Not(HasSubstr("died")));
}

TEST(PeerThatEnds, IsSaidToHaveLeft) {
  const auto leave = [](const std::function<void()>& how) {
    return [how] {
      barrier();
      rank() == 1 ? how() : expect_left();
    };
  };
  run_forked_worlds({
      {.name = "Return", .ranks = 3, .body = leave([] {})},
      {.name = "Shutdown", .ranks = 3, .body = leave([] { shutdown(); })},
      {.name = "Exit", .ranks = 3, .body = leave([] { std::exit(0); })},
      {.name = "ShutdownWithAGroupInHand", .ranks = 3, .body = leave([] {
                                                         static auto& kept =
                                                             *new Group(default_group());
                                                         shutdown();
                                                         EXPECT_TRUE(kept);
                                                       })},
      {.name = "ExitWithWorkInHand", .ranks = 3, .body = leave([] {
                                                   static auto& kept = *new Group(default_group());
                                                   static auto& work =
                                                       *new c10::intrusive_ptr<c10d::Work>(
                                                           receive(at::zeros({1}), 0));
                                                   EXPECT_TRUE(kept && work);
                                                   std::exit(0);
                                                 })},
  });
}

class PeerDeathBeforeAGroup : public ::testing::TestWithParam<std::string> {};

TEST_P(PeerDeathBeforeAGroup, IsNoticedBeforeTheTimeout) {
  const auto body = [] {
    if (rank() == 2) raise(SIGKILL);
    const auto begun = Clock::now();
    EXPECT_THAT(error_of([] { new_group({0, 1, 2}, {.timeout = 60s}); }),
                AllOf(HasSubstr("group 'ranks 0,1,2'"), HasSubstr("still misses rank"),
                      HasSubstr("rank 2 (process "), HasSubstr(") has ended; look at its own")));
    EXPECT_LT(Clock::now() - begun, 10s);
    if (GetParam() != "gloo") return;
    EXPECT_THAT(error_of([] { monitored_barrier({}, 60s); }), HasSubstr("rank 2 (process "));
    EXPECT_LT(Clock::now() - begun, 20s);
  };
  testing::run_processes(3, body, {.backend = GetParam(), .may_die = {2}});
}

INSTANTIATE_TEST_SUITE_P(Backends, PeerDeathBeforeAGroup, ::testing::Values("shm", "gloo"),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace tessera::comm::shm
