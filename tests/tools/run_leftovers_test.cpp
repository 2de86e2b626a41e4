// `tessera run` leaves no process behind, whatever its ranks have started and however it ends.

#include "tools/launched_tool.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace tessera::test {
namespace {

TEST(RunLeftovers, EndsRanksWhenOneFails) {
  const Fifo go("go");
  LaunchedTool tool({shell_ranks({"-n", "3"},
                                 "echo $$; [ $TESSERA_RANK != 0 ] && exec sleep 1000; "
                                 "read go < " +
                                     go.path() + "; exit 5")});
  std::vector<WatchedProcess> ranks;
  for (const char* rank : {"[0] ", "[1] ", "[2] "}) {
    ranks.emplace_back(std::stoi(tool.rest_of_out_line(rank)));
  }
  go.write_line();
  EXPECT_EQ(tool.wait().exit_code, 5);
  for (const auto& rank : ranks) EXPECT_TRUE(rank.has_ended());
}

TEST(RunLeftovers, DoesNotWaitForBackgroundProcessesThatHoldTheOutput) {
  LaunchedTool tool({shell_ranks({"-n", "2"}, "sleep 1000 & echo $!")});
  const auto result = tool.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(lines_of(result.out).size(), 2u);
  for (const auto& line : lines_of(result.out)) {
    EXPECT_EQ(::kill(std::stoi(line.substr(4)), 0), -1) << line;
  }
}

TEST(RunLeftovers, EndsProcessesThatHideInASessionOfTheirOwn) {
  const auto result = run_tool({probe_ranks({"-n", "2"}, {"daemon"})});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  ASSERT_EQ(lines_of(result.out).size(), 2u);
  for (const auto& line : lines_of(result.out)) {
    const std::string start = "[0] daemon ";
    EXPECT_EQ(::kill(std::stoi(line.substr(start.size())), 0), -1) << line;
  }
}

TEST(RunLeftovers, EndsDaemonsThatFlood) {
  const auto result = run_tool({shell_ranks({"-n", "1"}, "setsid yes & exit 0")});
  EXPECT_EQ(result.exit_code, 0);
}

TEST(RunLeftovers, SparesProcessesThatWereThereBefore) {
  // The inner shell becomes a launcher, so its background job becomes that launcher's child.
  LaunchedTool tool({shell_ranks({"-n", "1", "--no-prefix"},
                                 "sh -c 'sleep 1000 & echo started $!; exec " TESSERA_TOOL
                                 " run -n 1 -- true'; echo end; exec sleep 1000")});
  const WatchedProcess spared(std::stoi(tool.rest_of_out_line("started ")));
  tool.rest_of_out_line("end");
  EXPECT_FALSE(spared.has_ended());
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait().exit_code, 128 + SIGTERM);
  EXPECT_TRUE(spared.has_ended()) << "the outer launcher saw it begin";
}

TEST(RunLeftovers, LeavesNothingWhenTheLauncherIsKilled) {
  LaunchedTool tool({shell_ranks({"-n", "3"}, "sleep 1000 & echo up $!; wait")});
  std::vector<WatchedProcess> processes;
  for (const char* rank : {"[0] ", "[1] ", "[2] "}) {
    processes.emplace_back(std::stoi(tool.rest_of_out_line(rank + std::string("up "))));
  }
  const auto children = children_of(tool.pid());
  EXPECT_EQ(children.size(), 3u + 1) << "ranks and the watcher";
  for (const pid_t child : children) processes.emplace_back(child);
  tool.signal(SIGKILL);
  for (const auto& process : processes) EXPECT_TRUE(process.ends()) << process.pid();
  EXPECT_EQ(tool.wait().exit_code, 128 + SIGKILL);
}

TEST(RunLeftovers, EndsAnInnerRunWithTheOuterOne) {
  LaunchedTool tool(
      {shell_ranks({"-n", "1", "--no-prefix"},
                   "exec " TESSERA_TOOL " run -n 2 -- sh -c 'echo $$; exec sleep 1000'")});
  std::vector<WatchedProcess> ranks;
  for (const char* rank : {"[0] ", "[1] "}) {
    ranks.emplace_back(std::stoi(tool.rest_of_out_line(rank)));
  }
  tool.signal(SIGKILL);
  for (const auto& rank : ranks) EXPECT_TRUE(rank.ends());
}

}  // namespace
}  // namespace tessera::test
