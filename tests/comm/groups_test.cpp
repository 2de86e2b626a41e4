// Groups made from rank lists: their names, order, independence and ends.
#include "comm/groups.h"

#include "comm/collective_bodies.h"
#include "comm/context.h"
#include "support/random.h"
#include "support/ranks.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <numeric>
#include <thread>

namespace tessera {
namespace {

using collective_bodies::message_of;
using collective_bodies::Tensors;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RankKind;
using testing::run_ranks;
using testing::run_threads;
using namespace std::chrono_literals;

/// The sum of the members' world ranks by a collective in this group.
int64_t sum_of_ranks(const Group& group) {
  Tensors tensors{at::full({1}, rank(), at::kLong)};
  group->allreduce(tensors)->wait();
  return tensors[0].item<int64_t>();
}

class Groups : public ::testing::TestWithParam<std::tuple<std::string, RankKind>> {
 protected:
  void run(int n, const testing::RankBody& body) const {
    run_ranks(std::get<1>(GetParam()), n, body,
              {.backend = std::get<0>(GetParam()), .timeout = 20s});
  }
};

class GroupsOnThreads : public Groups {};
class GroupsOnProcesses : public Groups {};

void keep_the_order_of_the_list() {
  const auto group = new_group({2, 0, 3});
  EXPECT_EQ(rank(group), rank() == 2 ? 0 : rank() == 0 ? 1 : 2);
  EXPECT_EQ(world_size(group), 3);
  EXPECT_THAT(ranks(group), ElementsAre(2, 0, 3));
  EXPECT_EQ(sum_of_ranks(group), 5);
  EXPECT_THAT(gather_bytes(std::to_string(rank()), group), ElementsAre("2", "0", "3"));
  EXPECT_EQ(broadcast_bytes(std::to_string(rank()), /*source=*/2, group), "3");
  const auto gathered = all_gather(at::full({1}, rank(), at::kLong), 0, group);
  EXPECT_TRUE(gathered.equal(at::tensor({2, 0, 3}, at::kLong)));
}

TEST_P(GroupsOnThreads, KeepTheOrderOfTheList) {
  run(4, [] {
    if (rank() != 1) keep_the_order_of_the_list();
    barrier();
  });
}
TEST_P(GroupsOnProcesses, KeepTheOrderOfTheList) {
  run(4, [] {
    if (rank() != 1) keep_the_order_of_the_list();
    barrier();
  });
}

/// Rows, columns and a diagonal of a 2 x 2 arrangement, used in turn and at once.
void overlap() {
  const int row = rank() / 2;
  const int column = rank() % 2;
  const auto rows = new_group({2 * row, 2 * row + 1});
  const auto columns = new_group({column, column + 2});
  Group diagonal;
  if (row == column) diagonal = new_group({0, 3});
  for (int turn = 0; turn < 20; ++turn) {
    const int64_t count = turn % 5 == 0 ? 100'000 : 3;
    const auto own = at::full({count}, rank(), at::kLong);
    Tensors in_row{own.clone()};
    Tensors in_column{own.clone()};
    Tensors in_world{own.clone()};
    Tensors in_diagonal{own.clone()};
    std::vector<collective_bodies::WorkPtr> works{rows->allreduce(in_row),
                                                  columns->allreduce(in_column)};
    if (diagonal) works.push_back(diagonal->allreduce(in_diagonal));
    works.push_back(default_group()->allreduce(in_world));
    if (turn % 2 == 0) std::reverse(works.begin(), works.end());
    for (const auto& work : works) work->wait();
    EXPECT_TRUE(in_row[0].eq(4 * row + 1).all().item<bool>());
    EXPECT_TRUE(in_column[0].eq(2 * column + 2).all().item<bool>());
    EXPECT_TRUE(in_world[0].eq(6).all().item<bool>());
    if (diagonal) {
      EXPECT_TRUE(in_diagonal[0].eq(3).all().item<bool>());
    }
  }
}

TEST_P(GroupsOnThreads, MayOverlapAndBeUsedAtOnce) { run(4, overlap); }
TEST_P(GroupsOnProcesses, MayOverlapAndBeUsedAtOnce) { run(4, overlap); }

TEST_P(GroupsOnThreads, HaveNamesThatAreEqualOnAllRanksAndDifferBetweenGroups) {
  run(3, [] {
    std::vector<Group> groups{default_group(), new_group({0, 1, 2}), new_group({2, 1, 0}),
                              new_group({0, 1, 2}, {.description = "dp"})};
    std::set<std::string> names;
    for (const auto& group : groups) {
      const auto& name = group->getGroupName();
      names.insert(name);
      EXPECT_THAT(gather_bytes(name), ElementsAre(name, name, name));
    }
    EXPECT_EQ(names.size(), groups.size());
    EXPECT_EQ(groups[3]->getGroupDesc(), "dp");
  });
}

TEST_P(GroupsOnThreads, OfTheSameListAreIndependent) {
  run(2, [] {
    const auto first = new_group({0, 1});
    const auto second = new_group({0, 1});
    Tensors one{at::full({1}, 1, at::kLong)};
    Tensors other{at::full({1}, 10, at::kLong)};
    // Different orders on the two ranks: each group has its own sequence.
    auto work = rank() == 0 ? first->allreduce(one) : second->allreduce(other);
    auto later = rank() == 0 ? second->allreduce(other) : first->allreduce(one);
    later->wait();
    work->wait();
    EXPECT_EQ(one[0].item<int64_t>(), 2);
    EXPECT_EQ(other[0].item<int64_t>(), 20);
  });
}

TEST_P(GroupsOnThreads, OfOneRankNeedNobody) {
  run(3, [] {
    const auto alone = new_group({rank()});
    EXPECT_EQ(rank(alone), 0);
    EXPECT_EQ(world_size(alone), 1);
    EXPECT_EQ(sum_of_ranks(alone), rank());
    EXPECT_THAT(ranks(alone), ElementsAre(rank()));
    barrier(alone);
    monitored_barrier(alone);
  });
}

TEST_P(GroupsOnThreads, AreManyWithoutHarm) {
  run(2, [] {
    std::vector<Group> groups;
    for (int i = 0; i < 30; ++i) groups.push_back(new_group({0, 1}));
    for (const auto& group : groups) EXPECT_EQ(sum_of_ranks(group), 1);
  });
}

void join_again() {
  const auto options = testing::rank_init_options();
  for (int turn = 0; turn < 4; ++turn) {
    init(options);
    EXPECT_EQ(sum_of_ranks(default_group()), 3);
    if (rank() < 2) {
      EXPECT_EQ(sum_of_ranks(new_group({1, 0})), 1);
    }
    EXPECT_EQ(sum_of_ranks(new_group({0, 1, 2})), 3);
    shutdown();
    EXPECT_FALSE(is_initialized());
  }
}

/// Far away: what it answers is old when it comes.
class DistantStore final : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  bool check(const std::vector<std::string>& keys) override {
    const bool found = PrefixStore::check(keys);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return found;
  }
};

/// As with NCCL, which connects later: a rank may be at the next call while others look for it.
TEST(NewGroupOnThreads, MayFollowEachOtherFast) {
  run_threads(2,
              [] {
                auto options = testing::rank_init_options();
                if (testing::run_rank() == 0)
                  options.store = c10::make_intrusive<DistantStore>("far", options.store);
                else
                  options.store = c10::make_intrusive<c10d::PrefixStore>("far", options.store);
                init(options);
                const auto context = comm::require_context("new_group");
                const std::vector<int> both{0, 1};
                for (int i = 0; i < 40; ++i) {
                  // Late by what may lie between two looks of the other, then twice in a row.
                  if (rank() == 1 && i % 2 == 0)
                    std::this_thread::sleep_for(std::chrono::milliseconds(i / 2 % 10));
                  {
                    const std::lock_guard lock(context->mutex);
                    context->group_counts[both] = i + 1;
                  }
                  comm::rendezvous_for_group(*context, {.ranks = both, .count = i}, 20s);
                }
              },
              {.init = false});
}

TEST_P(GroupsOnThreads, WorkAgainAfterShutdownAndInit) {
  const auto& [backend, kind] = GetParam();
  run_ranks(kind, 3, join_again, {.backend = backend, .timeout = 20s, .init = false});
}
TEST_P(GroupsOnProcesses, WorkAgainAfterShutdownAndInit) {
  const auto& [backend, kind] = GetParam();
  run_ranks(kind, 3, join_again, {.backend = backend, .timeout = 20s, .init = false});
}

TEST_P(GroupsOnThreads, OfDifferentListsAreAnErrorAtOnceThatNamesBoth) {
  const auto begun = std::chrono::steady_clock::now();
  run(2, [] {
    const auto other_order = message_of<c10::ValueError>([] { new_group({rank(), 1 - rank()}); });
    EXPECT_EQ(other_order,
              "new_group: the ranks disagree: rank 0 calls it for ranks 0 and 1, rank 1 calls it "
              "for ranks 1 and 0; every listed rank must call it with the same ranks in the same "
              "order");
  });
  run(3, [] {  // rank 2 waits for rank 1, which does not wait for it
    const auto other_ranks =
        message_of<c10::ValueError>([] { rank() == 1 ? new_group({0, 1}) : new_group({0, 1, 2}); });
    EXPECT_THAT(other_ranks, AllOf(HasSubstr("rank 0 calls it for ranks 0, 1 and 2"),
                                   HasSubstr("rank 1 calls it for ranks 0 and 1")));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 20s);
}

TEST_P(GroupsOnThreads, MayBeMadeInAnyOrderThatComesTogether) {
  run(3, [] {  // rank 2 waits for rank 0, which is busy with rank 1 first
    if (rank() != 2) {
      EXPECT_EQ(sum_of_ranks(new_group({0, 1})), 1);
    }
    if (rank() != 1) {
      EXPECT_EQ(sum_of_ranks(new_group({2, 0})), 2);
    }
  });
}

/// A program that keeps a group or a work beyond shutdown gets errors, not a crash.
TEST_P(GroupsOnThreads, MayBeHeldBeyondShutdown) {
  run(2, [] {
    const auto group = new_group({0, 1});
    Tensors tensors{at::ones({3})};
    const auto reduced = group->allreduce(tensors);
    Tensors out{at::ones({3})};
    Tensors in{at::zeros({3})};
    const auto sent = group->send(out, 1 - rank(), 0);
    const auto received = group->recv(in, 1 - rank(), 0);
    received->wait();
    shutdown();
    reduced->wait();  // completed by shutdown at the latest
    EXPECT_TRUE(tensors[0].eq(2).all().item<bool>());
    sent->wait();
    EXPECT_THAT(message_of<c10::Error>([&] { group->allreduce(tensors)->wait(); }),
                HasSubstr("shut down"));
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, GroupsOnThreads,
                         ::testing::Combine(::testing::Values("shm", "gloo"),
                                            ::testing::Values(RankKind::Threads)),
                         [](const auto& info) { return std::get<0>(info.param); });
INSTANTIATE_TEST_SUITE_P(Backends, GroupsOnProcesses,
                         ::testing::Combine(::testing::Values("shm", "gloo"),
                                            ::testing::Values(RankKind::Processes)),
                         [](const auto& info) { return std::get<0>(info.param); });

TEST(NewGroupOnThreads, RefusesListsThatMakeNoGroup) {
  run_threads(2, [] {
    EXPECT_THAT(message_of<c10::ValueError>([] { new_group({}); }), HasSubstr("empty list"));
    EXPECT_THAT(message_of<c10::ValueError>([] { new_group({0, 2}); }),
                AllOf(HasSubstr("from 0 to 1"), HasSubstr("got 0 and 2")));
    EXPECT_THAT(message_of<c10::ValueError>([] { new_group({-1, 0, 1}); }), HasSubstr("got -1"));
    EXPECT_THAT(message_of<c10::ValueError>([] { new_group({0, 1, 0}); }),
                HasSubstr("got 0, 1 and 0; name 0 once"));
    EXPECT_THAT(message_of<c10::ValueError>([] { new_group({1 - rank()}); }),
                HasSubstr(c10::str("got rank ", rank())));
    EXPECT_THAT(message_of<c10::ValueError>([] { new_group({0, 1}, {.backend = "mpi"}); }),
                AllOf(HasSubstr("\"shm\""), HasSubstr("\"mpi\"")));
    EXPECT_THAT(message_of<c10::ValueError>([] { new_group({0, 1}, {.timeout = 0ms}); }),
                HasSubstr("timeout above 0"));
    // None of them counted: the next group is the same one on both ranks.
    EXPECT_EQ(sum_of_ranks(new_group({0, 1})), 1);
  });
}

TEST(NewGroupOnThreads, TellsThatInitComesFirst) {
  const comm::ContextScope nobody;
  for (const auto& call : std::vector<std::function<void()>>{
           [] { new_group({0}); }, [] { default_group(); }, [] { rank(); }, [] { barrier(); },
           [] { gather_bytes(""); }, [] { all_reduce(at::ones({1})); },
           [] { empty_shared({1}); }}) {
    EXPECT_THAT(message_of<c10::Error>(call), HasSubstr("init()"));
  }
}

TEST(NewGroupOnThreads, TakesTimeoutAndBackendOfTheWorldUnlessGiven) {
  run_threads(2,
              [] {
                const auto timeout_of = [](const Group& group) {
                  return group->getBackend(at::kCPU)->getBackendOptions()->timeout;
                };
                EXPECT_EQ(timeout_of(default_group()), 7s);
                EXPECT_EQ(timeout_of(new_group({0, 1})), 7s);
                EXPECT_EQ(timeout_of(new_group({0, 1}, {.timeout = 3s})), 3s);
                const auto name_of = [](const Group& group) {
                  return group->getBackend(at::kCPU)->getBackendName();
                };
                EXPECT_EQ(name_of(new_group({0, 1})), "shm");
                const auto gloo = new_group({0, 1}, {.backend = Backend::Gloo});
                EXPECT_EQ(name_of(new_group({0, 1}, {.backend = ""})), "shm");
                const std::string option = "cpu:gloo";
                EXPECT_EQ(name_of(new_group({0, 1}, {.backend = option})), "gloo");
                EXPECT_EQ(
                    name_of(new_group({0, 1}, {.backend = DeviceBackends{.cpu = Backend::Gloo}})),
                    "gloo");
                EXPECT_EQ(name_of(gloo), "gloo");
                EXPECT_EQ(sum_of_ranks(gloo), 1);
              },
              {.backend = "shm", .timeout = 7s});
}

TEST(DefaultTimeout, IsFiveMinutes) {
  EXPECT_EQ(InitOptions().timeout, 5min);
  EXPECT_EQ(kDefaultTimeout, 5min);
}

TEST(Backends, AreListedAndSayWhatTheyCarry) {
  const auto names = available_backends();
  EXPECT_THAT(names, ::testing::IsSupersetOf({"shm", "gloo", "fake"}));
  EXPECT_EQ(names.front(), "shm");
  for (const auto dtype : collective_bodies::kDtypes) {
    EXPECT_TRUE(supports("shm", at::kCPU, dtype));
    EXPECT_TRUE(supports("gloo", at::kCPU, dtype));
    EXPECT_TRUE(supports("fake", at::kCPU, dtype));
    EXPECT_EQ(supports("shm", at::kCUDA, dtype), testing::gpu_count() > 0);
    EXPECT_EQ(supports("gloo", at::kCUDA, dtype), testing::gpu_count() > 0);
    EXPECT_FALSE(supports("nccl", at::kCPU, dtype));
  }
  EXPECT_FALSE(supports("shm", at::kCPU, at::kQInt8));
  EXPECT_THAT(message_of<c10::ValueError>([] { supports("smoke", at::kCPU, at::kFloat); }),
              HasSubstr("\"smoke\""));
}

TEST(AutoBackendOnThreads, IsShmOnOneHost) {
  run_threads(2,
              [] {
                EXPECT_EQ(default_group()->getBackend(at::kCPU)->getBackendName(), "shm");
                EXPECT_EQ(new_group({0, 1})->getBackend(at::kCPU)->getBackendName(), "shm");
              },
              {.backend = "auto"});
}

TEST(WorldOfOne, NeedsNoLauncher) {
  const comm::ContextScope nobody;
  InitOptions options;
  options.rank = 0;
  options.world_size = 1;
  options.store = c10::make_intrusive<c10d::HashStore>();
  options.dump_signal = 0;
  init(options);
  EXPECT_EQ(rank(), 0);
  EXPECT_EQ(world_size(), 1);
  EXPECT_EQ(local_rank(), 0);
  EXPECT_THAT(ranks(default_group()), ElementsAre(0));
  EXPECT_EQ(sum_of_ranks(default_group()), 0);
  EXPECT_TRUE(all_gather(at::ones({2})).equal(at::ones({2})));
  EXPECT_THAT(message_of<c10::Error>([&] { init(options); }), HasSubstr("already rank 0 of 1"));
  shutdown();
  shutdown();
  EXPECT_FALSE(is_initialized());
}

}  // namespace
}  // namespace tessera
