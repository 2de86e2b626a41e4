#include <tessera/compile.h>

#include "support/random.h"
#include "support/rank_run.h"
#include "support/reused_ranks.h"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>  // program_invocation_name
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

namespace {

/// What tests count begins at 0, in ranks that are used again as well.
class CountersFromZero : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override {
    tessera::testing::reset_run_count();
    tessera::counters().clear();
  }
};

/// A test that hangs is named, and takes no others' time: where TESSERA_TEST_SECONDS says how long
/// one may take, as ctest's tests do.
class TimeLimit : public ::testing::EmptyTestEventListener {
 public:
  explicit TimeLimit(unsigned seconds) : seconds_(seconds) { std::signal(SIGALRM, &end_process); }

 private:
  void OnTestStart(const ::testing::TestInfo& info) override {
    what = std::string(info.test_suite_name()) + "." + info.name() + " runs longer than " +
           std::to_string(seconds_) + " s (TESSERA_TEST_SECONDS): the process ends\n";
    alarm(seconds_);
  }
  void OnTestEnd(const ::testing::TestInfo& info) override { alarm(0); }

  static void end_process(int) {
    [[maybe_unused]] const auto written = write(STDERR_FILENO, what.data(), what.size());
    _exit(tessera::testing::kExitFailed);
  }

  unsigned seconds_;
  static inline std::string what;
};

/// The way to repeat a test that failed with a drawn seed.
class SeedReporter : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo& info) override {
    const char* seed = std::getenv("TESSERA_TEST_SEED");
    if (seed == nullptr || !info.result()->Failed()) return;
    std::cout << "To repeat it: TESSERA_TEST_SEED=" << seed << " " << program_invocation_name
              << " --gtest_filter=" << info.test_suite_name() << "." << info.name() << std::endl;
  }
};

/// For tests/mutants: the number of the test that runs, from 1, where faults that it comes by can
/// read it, in ranks as well; and the tests' names, in that order.
class RunningTest : public ::testing::EmptyTestEventListener {
 public:
  explicit RunningTest(const std::string& path)
      : file_(open(path.c_str(), O_WRONLY | O_CLOEXEC)), names_(path + ".names") {}
  ~RunningTest() override { close(file_); }

 private:
  void OnTestStart(const ::testing::TestInfo& info) override {
    ++number_;
    [[maybe_unused]] const auto written = pwrite(file_, &number_, sizeof(number_), 0);
    names_ << info.test_suite_name() << "." << info.name() << std::endl;
  }

  int file_;
  std::ofstream names_;
  unsigned number_ = 0;
};

/// Ranks that crash at their end, in destructors or CUDA's teardown, fail the test binary.
class EndOfReusedRanks : public ::testing::Environment {
  void TearDown() override { tessera::testing::end_reused_ranks(); }
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();  // which own what they get
  listeners.Append(new CountersFromZero);
  at::set_num_threads(1);  // as the ranks, so that bits agree
  if (!tessera::testing::child_identity()) {
    if (!GTEST_FLAG_GET(list_tests)) {
      std::cout << "Seed of random tests: " << tessera::testing::test_seed()
                << " (TESSERA_TEST_SEED)\n";
    }
    listeners.Append(new SeedReporter);
    if (const char* seconds = std::getenv("TESSERA_TEST_SECONDS"))
      listeners.Append(new TimeLimit(std::stoul(seconds)));
    if (const char* path = std::getenv("TESSERA_RUNNING_TEST")) {
      listeners.Append(new RunningTest(path));
      unsetenv("TESSERA_RUNNING_TEST");  // tests start this program as well
    }
    ::testing::AddGlobalTestEnvironment(new EndOfReusedRanks);  // which gtest owns
    return RUN_ALL_TESTS();
  }
  if (tessera::testing::is_reused_rank()) return tessera::testing::serve_runs();
  if (GTEST_FLAG_GET(filter) == "*") {
    std::cout << "TESSERA_TEST_RANK is set: a rank needs a --gtest_filter that names its test"
              << std::endl;
    return tessera::testing::kExitNotReached;
  }
  // A rank exits inside its test; getting past it means that the test never came to its run.
  [[maybe_unused]] const int unreachable = RUN_ALL_TESTS();
  return tessera::testing::say_not_reached();
}
