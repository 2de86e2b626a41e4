// Which sockets of a rank listen: none where none is needed, none that the network can reach.
#include "support/ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace tessera::comm {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

/// The sockets this process has open, by inode.
std::set<std::string> own_sockets() {
  std::set<std::string> inodes;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry.path(), gone).string();
    constexpr std::string_view kStart = "socket:[";
    if (target.starts_with(kStart))
      inodes.insert(target.substr(kStart.size(), target.size() - kStart.size() - 1));
  }
  return inodes;
}

/// The TCP addresses on which this process listens, as /proc has them: "0100007F:A1B2".
std::vector<std::string> listening_addresses() {
  constexpr const char* kListens = "0A";
  const auto own = own_sockets();
  std::vector<std::string> addresses;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    std::getline(file, line);  // the header
    while (std::getline(file, line)) {
      std::istringstream words(line);
      std::string number, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      words >> number >> local >> remote >> state >> queues >> timer >> retransmits >> user >>
          timeout >> inode;
      if (state == kListens && own.contains(inode)) addresses.push_back(local);
    }
  }
  return addresses;
}

class Listeners : public ::testing::TestWithParam<std::string> {};

TEST_P(Listeners, AreOnlyThoseThatAreNeeded) {
  const auto body = [] {
    auto options = testing::rank_init_options();
    options.init_method = "unix://@tessera-listeners-" + std::to_string(getppid()) + GetParam();
    init(options);
    EXPECT_EQ(all_reduce(at::ones({1})).item<float>(), 2);
    if (GetParam() == "shm") {
      EXPECT_THAT(listening_addresses(), IsEmpty());
    } else {
      EXPECT_THAT(listening_addresses(), Not(IsEmpty()));
      EXPECT_THAT(listening_addresses(), Each(StartsWith("0100007F:"))) << "127.0.0.1";
    }
    barrier();
  };
  testing::run_processes(2, body, {.backend = GetParam(), .init = false});
}

INSTANTIATE_TEST_SUITE_P(Backends, Listeners, ::testing::Values("shm", "gloo"),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace tessera::comm
