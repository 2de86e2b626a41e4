#include "support/subprocess.h"

#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace tessera::testing {

namespace {

TEST(Subprocess, TellsExitCodeOutputAndEnvironment) {
  const ProgramResult result =
      run_program({.arguments = {"sh", "-c", "echo $TEAPOT; echo 2>&1 $HOME; exit 3"},
                   .environment = {{"TEAPOT", "blue"}, {"HOME", std::nullopt}}});
  EXPECT_EQ(result.status.code, 3);
  EXPECT_EQ(result.status.text(), "exit code 3");
  EXPECT_EQ(result.output, "blue\n\n");
}

TEST(Subprocess, RunsInTheFolderAskedFor) {
  const TemporaryFolder folder;
  EXPECT_EQ(run_program({.arguments = {"pwd"}, .folder = folder.path()}).output,
            std::filesystem::canonical(folder.path()).string() + "\n");
}

TEST(Subprocess, AMissingProgramIsAnExitCode) {
  const ProgramResult result = run_program({.arguments = {"/no/such/program"}});
  EXPECT_EQ(result.status.code, 127);
  EXPECT_THAT(result.output, ::testing::HasSubstr("cannot execute /no/such/program"));
}

/// A pipe whose far end every process inherits that starts while it is open.
class Lifeline {
 public:
  Lifeline() { EXPECT_EQ(pipe(ends_), 0); }
  ~Lifeline() {
    close(ends_[0]);
    if (ends_[1] >= 0) close(ends_[1]);
  }
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

  /// True once all of them have ended.
  bool all_ended() {
    close(ends_[1]);
    ends_[1] = -1;
    pollfd end{.fd = ends_[0], .events = POLLIN, .revents = 0};
    return poll(&end, 1, 10000) == 1 && (end.revents & POLLHUP) != 0;
  }

 private:
  int ends_[2] = {-1, -1};
};

TEST(Subprocess, ATimeoutKillsTheWholeProcessGroup) {
  Lifeline lifeline;
  const ProgramResult result =
      run_program({.arguments = {"sh", "-c", "sleep 60 & wait"}}, std::chrono::milliseconds(300));
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.status.signal, SIGKILL);
  EXPECT_TRUE(lifeline.all_ended());
}

TEST(Subprocess, StopsAndResumes) {
  Subprocess process({.arguments = {"sleep", "60"}});
  EXPECT_TRUE(process.stop());
  EXPECT_TRUE(process.stopped());
  process.signal(SIGTERM);  // pending while it is stopped
  EXPECT_FALSE(process.wait(std::chrono::milliseconds(20)));
  process.resume();
  EXPECT_EQ(process.wait(std::chrono::seconds(10))->signal, SIGTERM);
}

TEST(Subprocess, DiesWithItsParent) {
  Lifeline lifeline;
  const pid_t parent = fork();
  if (parent == 0) {
    const Subprocess child({.arguments = {"sleep", "60"}});
    std::raise(SIGKILL);
  }
  EXPECT_EQ(waitpid(parent, nullptr, 0), parent);
  EXPECT_TRUE(lifeline.all_ended());
}

}  // namespace

}  // namespace tessera::testing
