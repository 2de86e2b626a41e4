#include "comm/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <thread>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A listening socket on a port of the kernel's choice: what `tessera run` hands to rank 0.
struct Listener {
  Listener() : fd(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(fd, 64), 0);
    EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port = ntohs(address.sin_port);
  }
  int fd;
  int port = 0;
};

struct FileName {
  std::string path = ::testing::TempDir() + "/tessera_store_" + std::to_string(getpid());
  FileName() { std::filesystem::remove(path); }
  ~FileName() { std::filesystem::remove(path); }
};

/// Runs the launches as threads that join one world; the text of each one's error, empty where
/// there is none.
std::vector<std::string> join_all(const std::vector<Launch>& launches,
                                  std::chrono::milliseconds timeout,
                                  const std::function<void(World&)>& check = {}) {
  std::vector<std::string> errors(launches.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < launches.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        auto world = join_world(open_store(launches[i], timeout), launches[i], timeout);
        if (check) check(world);
        leave_world(world, 5s);
      } catch (const c10::ValueError& error) {
        errors[i] = std::string("ValueError ") + error.what_without_backtrace();
      } catch (const c10::DistStoreError& error) {
        errors[i] = std::string("DistStoreError ") + error.what_without_backtrace();
      } catch (const c10::DistNetworkError& error) {
        errors[i] = std::string("DistNetworkError ") + error.what_without_backtrace();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

std::vector<Launch> launches_of(int world_size, const std::string& init_method,
                                std::optional<int> listen_fd = {}) {
  std::vector<Launch> launches(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    launches[rank] = {.rank = rank, .world_size = world_size, .init_method = init_method};
    if (rank == 0) launches[rank].listen_fd = listen_fd;
  }
  return launches;
}

std::string tcp(const Listener& listener) {
  return "tcp://127.0.0.1:" + std::to_string(listener.port);
}

class Rendezvous : public ::testing::TestWithParam<std::string> {
 protected:
  std::vector<Launch> launches(int world_size) {
    if (GetParam() == "file") return launches_of(world_size, "file://" + file_.path);
    static int count = 0;
    const auto name = "tessera-rendezvous-" + std::to_string(getpid()) + "-";
    if (GetParam() == "unix")
      return launches_of(world_size, "unix://@" + name + std::to_string(++count));
    listener_.emplace();
    return launches_of(world_size, tcp(*listener_), listener_->fd);
  }

 private:
  FileName file_;
  std::optional<Listener> listener_;
};

TEST_P(Rendezvous, BringsAllRanksTogether) {
  const auto errors = join_all(launches(4), 20s, [](World& world) {
    EXPECT_EQ(world.world_size, 4);
    EXPECT_EQ(world.local_rank, world.rank);
    EXPECT_EQ(world.local_world_size, 4);
    EXPECT_EQ(world.hosts, std::vector<std::string>(4, world.hosts[0]));
    world.store->set("from" + std::to_string(world.rank), std::to_string(world.rank));
    EXPECT_EQ(world.store->get_to_str("from" + std::to_string((world.rank + 1) % 4)),
              std::to_string((world.rank + 1) % 4));
  });
  EXPECT_EQ(errors, std::vector<std::string>(4));
}

TEST_P(Rendezvous, SaysBothWorldSizesOnEveryRank) {
  auto all = launches(3);
  all[1].world_size = 4;
  const auto errors = join_all(all, 20s);
  const auto both = AllOf(HasSubstr("ValueError init: the ranks disagree on the world size"),
                          HasSubstr("says 3"), HasSubstr("rank 1 says 4"));
  EXPECT_THAT(errors, ::testing::Contains(both));
  for (const auto& error : errors) EXPECT_THAT(error, both);
}

TEST_P(Rendezvous, SaysWhoClaimsARankTwice) {
  auto all = launches(3);
  all[2].rank = 1;
  for (const auto& error : join_all(all, 20s)) {
    EXPECT_THAT(error, HasSubstr("ValueError init: two processes claim rank 1: process " +
                                 std::to_string(getpid())));
  }
}

TEST_P(Rendezvous, NamesTheMissingRanksInTime) {
  auto all = launches(4);
  all.erase(all.begin() + 3);
  all.erase(all.begin() + 1);
  const auto start = std::chrono::steady_clock::now();
  const auto errors = join_all(all, 300ms);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  for (const auto& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("DistStoreError init: rank "), HasSubstr("waited 300 ms"),
                             HasSubstr("missing: ranks 1 and 3"), HasSubstr(all[0].init_method)));
  }
}

INSTANTIATE_TEST_SUITE_P(Stores, Rendezvous, ::testing::Values("tcp", "file", "unix"),
                         [](const auto& instance) { return instance.param; });

TEST(RendezvousTcp, ServesOnAPortByItself) {
  int port = 0;
  {
    Listener listener;
    port = listener.port;
    close(listener.fd);
  }
  EXPECT_EQ(join_all(launches_of(2, "tcp://localhost:" + std::to_string(port)), 20s),
            std::vector<std::string>(2));
}

TEST(RendezvousTcp, LeavesServingToTheAgent) {
  Listener listener;
  c10d::TCPStoreOptions options;
  options.port = listener.port;
  options.isServer = true;
  options.masterListenFd = listener.fd;
  options.waitWorkers = false;
  c10d::TCPStore agent("127.0.0.1", options);
  auto all = launches_of(2, tcp(listener));
  for (auto& launch : all)
    launch.store_is_served_by_agent = true, launch.store_prefix = "/worker/attempt_0";
  EXPECT_EQ(join_all(all, 20s), std::vector<std::string>(2));
  EXPECT_EQ(join_all(all, 20s), std::vector<std::string>(2))
      << "joined again in a store that remembers";
}

TEST(RendezvousTcp, SaysWhereNobodyServes) {
  int port = 0;
  {
    Listener listener;
    port = listener.port;
    close(listener.fd);
  }
  auto all = launches_of(2, "tcp://127.0.0.1:" + std::to_string(port));
  all.erase(all.begin());
  const auto errors = join_all(all, 300ms);
  EXPECT_THAT(
      errors[0],
      AllOf(HasSubstr("DistNetworkError init: rank 1 of 2 could not reach the store at tcp://"),
            HasSubstr("is rank 0 running")));
}

TEST(RendezvousTcp, SaysThatThePortIsTaken) {
  Listener other;
  const auto errors = join_all({launches_of(2, tcp(other))[0]}, 2s);
  EXPECT_THAT(errors[0], AllOf(HasSubstr("DistNetworkError init: rank 0 of 2 could not serve"),
                               HasSubstr("is the port free")));
  close(other.fd);
}

TEST(RendezvousFile, SaysThatTheFileIsLeftFromAnEarlierJob) {
  FileName file;
  const auto all = launches_of(2, "file://" + file.path);
  std::vector<World> killed;  // still holds the store: nothing that ends a rank properly has run
  std::thread other([&] { join_world(open_store(all[1], 5s), all[1], 5s); });
  killed.push_back(join_world(open_store(all[0], 5s), all[0], 5s));
  other.join();
  for (const auto& error : join_all(all, 5s)) {
    EXPECT_THAT(error, AllOf(HasSubstr("two processes claim rank"),
                             HasSubstr("the file is left from an earlier one")));
  }
}

TEST(RendezvousFile, StaysForRanksThatJoinAgain) {
  FileName file;
  const auto all = launches_of(2, "file://" + file.path);
  EXPECT_EQ(join_all(all, 20s), std::vector<std::string>(2));
  EXPECT_TRUE(std::filesystem::exists(file.path))
      << "removed between two worlds, it would be lost for who is early in the second";
  EXPECT_EQ(join_all(all, 20s), std::vector<std::string>(2));
}

TEST(RendezvousFile, MayBeRemovedBetweenTwoWorlds) {
  FileName file;
  for (int time = 0; time < 3; ++time) {
    const auto all = launches_of(2, "file://" + file.path);
    EXPECT_EQ(join_all(all, 20s, [](World& world) { EXPECT_LE(world.store->add("x", 1), 2); }),
              std::vector<std::string>(2));
    std::filesystem::remove(file.path);
  }
}

TEST(RendezvousFile, RefusesAFolderThatIsNotThere) {
  for (const auto& error : join_all(launches_of(1, "file:///nowhere/at/all"), 1s)) {
    EXPECT_THAT(error, HasSubstr("the folder /nowhere/at does not exist"));
  }
}

TEST(RendezvousAlone, NeedsNobody) {
  const Launch launch{.rank = 3, .world_size = 1000, .is_alone = true};
  const World world = join_world(open_store(launch, 1s), launch, 1s);
  EXPECT_EQ(world.rank, 3);
  EXPECT_EQ(world.local_rank, 3);
  EXPECT_EQ(world.hosts.size(), 1000);
}

TEST(RendezvousOwnStore, IsFreshWhenJoinedAgain) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  for (int time = 0; time < 2; ++time) {
    auto join = [&](int rank) {
      World world = join_world(store, {.rank = rank, .world_size = 2}, 10s);
      EXPECT_LE(world.store->add("count", 1), 2);
      leave_world(world, 10s);
    };
    std::thread other(join, 1);
    join(0);
    other.join();
  }
}

}  // namespace
}  // namespace tessera::comm
