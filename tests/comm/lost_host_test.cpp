// Two hosts, played by two network namespaces with a cable between them that is pulled.
#include "comm/errors_of_calls.h"
#include "comm/heartbeat.h"
#include "comm/rendezvous.h"
#include "support/ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <unistd.h>

#include <cstdlib>
#include <thread>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using testing::Beacon;
using ::testing::HasSubstr;
using testing::RankProcesses;

bool shell(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
}

/// Becomes a host of its own, without a cable.
void unshare_network() {
  const std::string name = testing::run_rank() == 0 ? "alpha" : "beta";
  ASSERT_EQ(unshare(CLONE_NEWNET | CLONE_NEWUTS), 0);
  ASSERT_EQ(sethostname(name.c_str(), name.size()), 0);
  ASSERT_TRUE(shell("ip link set lo up"));
  Beacon("apart." + std::to_string(testing::run_rank())).signal();
  ASSERT_TRUE(Beacon("cabled").wait());
}

void join_over_the_cable() {
  const int own = testing::run_rank();
  const auto device = "tv" + std::to_string(own);
  ASSERT_TRUE(shell("ip addr add 10.231.7." + std::to_string(own + 1) + "/24 dev " + device));
  ASSERT_TRUE(shell("ip link set " + device + " up"));
  setenv("GLOO_SOCKET_IFNAME", device.c_str(), 1);
  auto options = testing::rank_init_options();
  options.init_method = "tcp://10.231.7.1:29777";
  options.heartbeat_timeout = 6s;
  init(options);
}

void lose_each_other() {
  unshare_network();
  join_over_the_cable();
  if (::testing::Test::HasFailure()) return;
  EXPECT_EQ(all_reduce(at::ones({2}))[0].item<float>(), 2);
  Beacon("joined." + std::to_string(rank())).signal();
  EXPECT_TRUE(Beacon("joined." + std::to_string(1 - rank())).wait());
  if (rank() == 1) {
    EXPECT_TRUE(shell("ip link set tv1 down"));
    Beacon("down").signal();
  }
  EXPECT_TRUE(Beacon("down").wait());
  const auto begun = std::chrono::steady_clock::now();
  const auto error = error_of([] { all_reduce(at::ones({2})); });
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 25s);
  if (rank() == 0) {
    EXPECT_THAT(error, AllOf(HasSubstr("gloo: all_reduce #2"),
                             HasSubstr("host 'beta' (rank 1) has not been heard of for ")));
  } else {
    EXPECT_THAT(error, AllOf(HasSubstr("gloo: all_reduce #2"),
                             HasSubstr("the store has given no answer for "),
                             HasSubstr("host 'alpha' (rank 0)")));
  }
}

bool can_make_namespaces() {
  return shell("unshare --net --uts ip link add tva type veth peer tvb");
}

TEST(LostHost, IsNamedWithItsRanks) {
  if (!can_make_namespaces()) GTEST_SKIP() << "needs root, iproute2 and network namespaces";
  RankProcesses ranks(2, lose_each_other,
                      {.backend = "gloo", .timeout = 120s, .deadline = 110s, .init = false});
  for (const char* name : {"apart.0", "apart.1"}) ASSERT_TRUE(ranks.beacon(name).wait());
  const auto pid = [&](int rank) { return std::to_string(ranks.pid(rank)); };
  const auto hand_over = [&](const std::string& device, int rank) {
    return shell("ip link set " + device + " netns " + pid(rank));
  };
  ASSERT_TRUE(shell("ip link add tv0 type veth peer name tv1"));
  EXPECT_TRUE(hand_over("tv0", 0) && hand_over("tv1", 1));
  ranks.beacon("cabled").signal();
  ranks.join();
}

World world_of_two_hosts(int rank, const c10::intrusive_ptr<c10d::Store>& store) {
  World world{.rank = rank, .world_size = 3, .store = store};
  world.hosts = {"a", "b", "b"};
  world.networks = {"n", "n", "n"};
  world.host_names = {"alpha", "beta", "beta"};
  return world;
}

/// Asks as one who waits does, until there is an answer or so long.
std::optional<std::string> ask_for(Heartbeat& heartbeat, std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  std::optional<std::string> lost;
  while (!lost && std::chrono::steady_clock::now() < end) {
    lost = heartbeat.find_lost({0, 1, 2});
    std::this_thread::sleep_for(50ms);
  }
  return lost;
}

TEST(Heartbeat, NamesAHostThatIsNotHeardOfAndNoOther) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_TRUE(spans_hosts(world_of_two_hosts(0, store)));
  Heartbeat alpha(world_of_two_hosts(0, store), 800ms);
  EXPECT_THAT(ask_for(alpha, 20s).value_or(""),
              HasSubstr("host 'beta' (ranks 1 and 2) has not been heard of for "));
  {
    Heartbeat beta(world_of_two_hosts(1, store), 800ms);
    EXPECT_EQ(ask_for(beta, 2s), std::nullopt);
    Heartbeat again(world_of_two_hosts(0, store), 800ms);
    EXPECT_EQ(ask_for(again, 2s), std::nullopt);
  }
  Heartbeat last(world_of_two_hosts(0, store), 800ms);
  EXPECT_EQ(ask_for(last, 2s), std::nullopt) << "who has left is not lost";
}

/// Gives no answer once it is silent, as a store behind a link that is down.
class SilentStore final : public c10d::HashStore {
 public:
  explicit SilentStore(std::shared_ptr<std::atomic<bool>> is_silent)
      : is_silent_(std::move(is_silent)) {}
  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<SilentStore>(is_silent_);
  }
  int64_t add(const std::string& key, int64_t value) override {
    while (*is_silent_) std::this_thread::sleep_for(5ms);
    return HashStore::add(key, value);
  }

 private:
  std::shared_ptr<std::atomic<bool>> is_silent_;
};

TEST(Heartbeat, NamesTheHostOfAStoreThatGivesNoAnswer) {
  auto is_silent = std::make_shared<std::atomic<bool>>(true);
  const auto store = c10::make_intrusive<SilentStore>(is_silent);
  Heartbeat heartbeat(world_of_two_hosts(1, store), 800ms);
  EXPECT_THAT(
      ask_for(heartbeat, 20s).value_or(""),
      AllOf(HasSubstr("the store has given no answer for "), HasSubstr("host 'alpha' (rank 0)")));
  *is_silent = false;
}

}  // namespace
}  // namespace tessera::comm
