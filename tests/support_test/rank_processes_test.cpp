#include "support/ranks.h"
#include "support/reused_ranks.h"
#include "support/variables.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <map>
#include <stdexcept>

namespace tessera::testing {

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Most of these tests are about processes; joining a world would only add to their time.
RankOptions apart(RankOptions options = {}) {
  options.init = false;
  return options;
}

bool in_rank() { return std::getenv("TESSERA_TEST_RANK") != nullptr; }

/// What `run` reports to the test, kept from it. For the parent: ranks must report to their
/// process.
void intercept(const std::function<void()>& run, ::testing::TestPartResultArray& results) {
  const ::testing::ScopedFakeTestPartResultReporter reporter(
      ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &results);
  run();
}

/// The text of the one failure that such a run reports.
std::string failure_of_run(int n, const RankBody& body, RankOptions options = {}) {
  if (in_rank()) {
    run_processes(n, body, apart(options));
    return {};
  }
  ::testing::TestPartResultArray results;
  intercept([&] { run_processes(n, body, apart(options)); }, results);
  std::string text;
  for (int index = 0; index < results.size(); ++index) {
    text += results.GetTestPartResult(index).message();
  }
  EXPECT_EQ(results.size(), 1) << text;
  return text;
}

TEST(RankProcesses, EveryRankKnowsItsPlace) {
  run_processes(3, [] {
    EXPECT_EQ(world_size(), 3);
    EXPECT_EQ(rank(), run_rank());
    const std::vector<std::string> ranks = gather_bytes(std::to_string(rank()));
    EXPECT_EQ(ranks, (std::vector<std::string>{"0", "1", "2"}));
  });
}

TEST(RankProcesses, SeedsAreEqualOnAllRanks) {
  run_processes(2, [] {
    std::ostringstream drawn;
    drawn << at::randn({4});
    const std::vector<std::string> all = gather_bytes(drawn.str());
    EXPECT_EQ(all[0], all[1]);
    at::manual_seed(1234);
    std::ostringstream again;
    again << at::randn({4});
    EXPECT_EQ(drawn.str(), again.str());
  });
}

TEST(RankProcesses, ReportsTheFailingRankWithItsText) {
  const std::string text = failure_of_run(2, [] { EXPECT_NE(run_rank(), 1) << "only rank 1"; });
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1 of 2 (process)"), HasSubstr("exit code 1"),
                          HasSubstr("only rank 1"), HasSubstr("rank_processes_test.cpp")));
}

TEST(RankProcesses, ReportsAnException) {
  const std::string text = failure_of_run(2, [] {
    if (run_rank() == 0) throw std::runtime_error("no tea left");
  });
  EXPECT_THAT(text, AllOf(HasSubstr("rank 0 of 2"), HasSubstr("no tea left")));
}

TEST(RankProcesses, ReportsADyingRankWithItsSignal) {
  const std::string text = failure_of_run(2, [] {
    if (run_rank() == 1) std::raise(SIGKILL);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1 of 2"), HasSubstr("signal 9 (Killed)")));
}

TEST(RankProcesses, RanksThatMayDieMayEndBySignalOnly) {
  const auto die = [] {
    if (run_rank() == 1) std::raise(SIGKILL);
  };
  run_processes(2, die, apart({.may_die = {1}}));
  const auto fail = [] { EXPECT_EQ(run_rank(), 0); };
  EXPECT_THAT(failure_of_run(2, fail, {.may_die = {1}}), HasSubstr("rank 1 of 2"));
}

TEST(RankProcesses, KillsAndReportsWhatRunsAtTheDeadline) {
  const auto hang = [] { static_cast<void>(Beacon("never").wait(std::chrono::minutes(5))); };
  const std::string text = failure_of_run(1, hang, {.deadline = std::chrono::seconds(1)});
  EXPECT_THAT(text, AllOf(HasSubstr("rank 0 of 1"), HasSubstr("still running")));
}

TEST(RankProcesses, SeveralRunsInATestAreIndependent) {
  for (const int n : {2, 3, 1}) {
    run_processes(n, [n] { EXPECT_EQ(run_world_size(), n); }, apart());
  }
}

TEST(RankProcesses, ARunInsideABodyIsAnError) {
  const std::string text = failure_of_run(1, [] { run_processes(1, [] {}); });
  EXPECT_THAT(text, HasSubstr("can't start ranks of its own"));
}

TEST(RankProcesses, ATestThatEndsEarlierInRanksIsAnError) {
  if (in_rank()) return;
  EXPECT_THAT(failure_of_run(1, [] {}), HasSubstr("ended before its run 0"));
}

TEST(RankProcesses, ASkippingRankSkipsTheTest) {
  const auto body = [] {
    if (run_rank() == 1) GTEST_SKIP() << "for lack of tea";
  };
  if (in_rank()) return run_processes(2, body, apart());
  ::testing::TestPartResultArray results;
  intercept([&] { run_processes(2, body, apart()); }, results);
  ASSERT_EQ(results.size(), 1);
  EXPECT_TRUE(results.GetTestPartResult(0).skipped());
  EXPECT_THAT(results.GetTestPartResult(0).message(), HasSubstr("for lack of tea"));
}

TEST(RankProcesses, TheEnvironmentReachesTheRanksAlone) {
  run_processes(
      1, [] { EXPECT_STREQ(std::getenv("TEAPOT"), "blue"); },
      apart({.environment = {{"TEAPOT", "blue"}}}));
  EXPECT_EQ(std::getenv("TEAPOT"), nullptr);
}

TEST(RankProcesses, TheParentKillsStopsAndReleasesRanks) {
  RankProcesses processes(
      3,
      [] {
        Beacon("reached." + std::to_string(run_rank())).signal();
        EXPECT_TRUE(Beacon("go").wait());
      },
      apart({.may_die = {1, 2}}));
  for (const char* name : {"reached.0", "reached.1", "reached.2"}) {
    ASSERT_TRUE(processes.beacon(name).wait());
  }
  processes.kill(1);
  processes.stop(2);
  processes.beacon("go").signal();
  processes.join();
  EXPECT_EQ(processes.wait(1)->signal, SIGKILL);
  EXPECT_EQ(processes.wait(2)->signal, SIGKILL);  // stopped for good, killed by join
  EXPECT_TRUE(processes.wait(0)->ok());
}

TEST(RankProcesses, AResumedRankEndsWell) {
  RankProcesses processes(
      1,
      [] {
        Beacon("reached").signal();
        EXPECT_TRUE(Beacon("go").wait());
      },
      apart());
  ASSERT_TRUE(processes.beacon("reached").wait());
  processes.stop(0);
  processes.beacon("go").signal();
  EXPECT_FALSE(processes.wait(0, std::chrono::milliseconds(50)));
  processes.resume(0);
  processes.join();
}

TEST(RankProcesses, RanksOfALaterRunPassByTheParentsControl) {
  {
    RankProcesses first(2, [] { EXPECT_TRUE(Beacon("go").wait()); }, apart({.may_die = {1}}));
    first.kill(1);
    first.beacon("go").signal();
    EXPECT_TRUE(first.beacon("go").wait());
    first.join();
  }
  run_processes(1, [] { EXPECT_EQ(run_world_size(), 1); }, apart());
}

/// Within a test of this fixture ranks are used again.
class ReusedRanks : public ::testing::Test {
 protected:
  const Variables reuse_{{{"TESSERA_REUSE_RANKS", "1"}}};
};

/// How often the process has run bodies of this test before: 0 in a new one.
int times_here() {
  static std::map<std::string, int> times;
  return times[::testing::UnitTest::GetInstance()->current_test_info()->name()]++;
}

/// For tests with runs after this one, whose ranks pass by.
void expect_failure(int n, const RankBody& body, RankOptions options,
                    const ::testing::Matcher<std::string>& matcher) {
  const std::string text = failure_of_run(n, body, std::move(options));
  if (in_rank()) return;
  EXPECT_THAT(text, matcher);
}

TEST_F(ReusedRanks, ServeOneRunAfterTheOther) {
  for (int run = 0; run < 3; ++run) {
    run_processes(2, [run] {
      EXPECT_EQ(times_here(), run);
      EXPECT_EQ(gather_bytes(std::to_string(run_rank())), (std::vector<std::string>{"0", "1"}));
    });
  }
  if (in_rank()) std::abort();  // only the parent comes here
}

TEST_F(ReusedRanks, AreApartByTheirNumberAndEnvironment) {
  const auto is_new = [] { EXPECT_EQ(times_here(), 0); };
  run_processes(2, is_new, apart());
  run_processes(1, is_new, apart());
  run_processes(2, is_new, apart({.environment = {{"TEAPOT", "blue"}}}));
  run_processes(2, is_new, apart({.fresh = true}));
  run_processes(2, is_new, apart({.may_die = {1}}));
  run_processes(2, [] { EXPECT_EQ(times_here(), 1); }, apart());
}

TEST_F(ReusedRanks, EndWithARunThatFails) {
  run_processes(2, [] { EXPECT_EQ(times_here(), 0) << "the first run"; }, apart());
  const auto fail = [] {
    EXPECT_EQ(times_here(), 1);
    EXPECT_NE(run_rank(), 1) << "only rank 1";
  };
  expect_failure(2, fail, {},
                 AllOf(HasSubstr("rank 1 of 2 (process)"), HasSubstr("exit code 1"),
                       HasSubstr("only rank 1"), Not(HasSubstr("exception"))));
  const auto die = [] {
    EXPECT_EQ(times_here(), 0);
    if (run_rank() == 0) std::raise(SIGKILL);
  };
  expect_failure(2, die, {}, AllOf(HasSubstr("rank 0 of 2"), HasSubstr("signal 9 (Killed)")));
  const auto hang = [] { static_cast<void>(Beacon("never").wait(std::chrono::minutes(5))); };
  expect_failure(1, hang, {.deadline = std::chrono::seconds(3)},
                 AllOf(HasSubstr("rank 0 of 1"), HasSubstr("still running")));
  run_processes(2, [] { EXPECT_EQ(times_here(), 0); }, apart());
}

TEST_F(ReusedRanks, SkipTheTestAndStay) {
  const auto body = [] {
    EXPECT_EQ(times_here(), 0);
    GTEST_SKIP() << "for lack of tea";
  };
  if (in_rank()) {
    run_processes(1, body, apart());
  } else {
    ::testing::TestPartResultArray results;
    intercept([&] { run_processes(1, body, apart()); }, results);
    ASSERT_EQ(results.size(), 1);
    EXPECT_TRUE(results.GetTestPartResult(0).skipped());
    EXPECT_THAT(results.GetTestPartResult(0).message(),
                AllOf(HasSubstr("for lack of tea"), Not(HasSubstr("exception"))));
  }
  run_processes(1, [] { EXPECT_EQ(times_here(), 1); }, apart());
}

TEST_F(ReusedRanks, FailTheirParentWhenTheyEndBadly) {
  const auto body = [] {
    if (run_rank() == 1) std::atexit([] { std::_Exit(3); });
  };
  run_processes(2, body, apart());
  if (in_rank()) return;
  ::testing::TestPartResultArray results;
  intercept([] { end_reused_ranks(); }, results);
  ASSERT_EQ(results.size(), 1);
  EXPECT_THAT(
      results.GetTestPartResult(0).message(),
      AllOf(HasSubstr("rank 1 of 2"), HasSubstr("exit code 3"), Not(HasSubstr("rank 0 of 2"))));
}

TEST_F(ReusedRanks, SayWhenATestEndsBeforeTheirRun) {
  if (in_rank()) return;
  EXPECT_THAT(failure_of_run(1, [] {}), HasSubstr("ended before its run 0"));
}

TEST(DeviceCases, AreNamedByWhatTheyRunOn) {
  std::vector<std::string> names;
  for (const DeviceCase& each : cuda_cases({"nccl", "gloo"}, {2, 4})) names.push_back(each.name());
  EXPECT_THAT(names,
              ::testing::ElementsAre("cuda_nccl_2", "cuda_gloo_2", "cuda_nccl_4", "cuda_gloo_4"));
}

TEST(DeviceCases, RunOnTheirDevice) {
  run_on({.device = c10::DeviceType::CPU, .backend = "gloo", .ranks = 2}, [] {
    EXPECT_EQ(run_device(), c10::Device(c10::DeviceType::CPU));
    EXPECT_EQ(default_group()->getBackendName(), "gloo");
    EXPECT_EQ(std::getenv("NCCL_HOSTID"), nullptr);
  });
}

TEST(DeviceCasesOnCuda, GiveRanksThatShareAGpuHostsOfTheirOwn) {
  run_on({.device = c10::DeviceType::CUDA, .backend = "shm", .ranks = 2}, [] {
    EXPECT_EQ(run_device().index(), run_rank() % gpu_count());
    EXPECT_EQ(at::empty({1}, at::kCUDA).device(), run_device()) << "the current device";
    const char* host = std::getenv("NCCL_HOSTID");
    if (gpu_count() > 1) {
      EXPECT_EQ(host, nullptr);
    } else {
      EXPECT_EQ(std::string(host), "rank" + std::to_string(run_rank()));
    }
  });
}

class RankProcessesByCount : public ::testing::TestWithParam<int> {};

TEST_P(RankProcessesByCount, RunAlsoInParametrisedTests) {
  run_processes(GetParam(), [] { EXPECT_EQ(run_world_size(), GetParam()); }, apart());
}

INSTANTIATE_TEST_SUITE_P(Counts, RankProcessesByCount, ::testing::Values(1, 2),
                         [](const auto& info) { return "Of" + std::to_string(info.param); });

class RanksByKind : public ::testing::TestWithParam<RankKind> {};

TEST_P(RanksByKind, RunTheSameBody) {
  run_ranks(GetParam(), 2, [] {
    EXPECT_EQ(world_size(), 2);
    barrier();
    if (run_rank() == 0) Beacon("zero").signal();
    EXPECT_TRUE(Beacon("zero").wait());
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, RanksByKind,
                         ::testing::Values(RankKind::Threads, RankKind::Processes),
                         [](const auto& info) { return to_string(info.param); });

}  // namespace

}  // namespace tessera::testing
