#include "support/subprocess.h"

#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

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

TEST(Subprocess, ATimeoutKillsTheWholeProcessGroup) {
  const ProgramResult result = run_program({.arguments = {"sh", "-c", "sleep 60 & echo $!; wait"}},
                                           std::chrono::milliseconds(300));
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.status.signal, SIGKILL);
  // The orphan is init's to reap, which may take a moment; what counts is that it is no longer
  // alive.
  std::ifstream state("/proc/" + result.output.substr(0, result.output.find('\n')) + "/stat");
  std::string id, name, letter;
  const bool alive = (state >> id >> name >> letter) && letter != "Z";
  EXPECT_FALSE(alive);
}

TEST(Subprocess, StopsAndResumes) {
  Subprocess process({.arguments = {"cat"}});
  EXPECT_TRUE(process.stop());
  EXPECT_TRUE(process.stopped());
  process.signal(SIGTERM);  // pending while it is stopped
  EXPECT_FALSE(process.wait(std::chrono::milliseconds(20)));
  process.resume();
  EXPECT_EQ(process.wait(std::chrono::seconds(10))->signal, SIGTERM);
}

TEST(Subprocess, DiesWithItsParent) {
  const TemporaryFolder folder;
  // A child of a child: the shell in the middle is killed, and what it started through us would
  // live on without the death signal. Here we are the middle, so the middle is forked.
  int answer[2];
  ASSERT_EQ(pipe(answer), 0);
  const pid_t middle = fork();
  if (middle == 0) {
    const Subprocess grandchild({.arguments = {"sleep", "60"}});
    const pid_t pid = grandchild.pid();
    [[maybe_unused]] const ssize_t written = write(answer[1], &pid, sizeof pid);
    std::raise(SIGKILL);
  }
  // The write end is also the grandchild's: end of file comes when both are gone.
  close(answer[1]);
  pid_t pid = 0;
  ASSERT_EQ(read(answer[0], &pid, sizeof pid), static_cast<ssize_t>(sizeof pid));
  char rest = 0;
  EXPECT_EQ(read(answer[0], &rest, 1), 0);
  close(answer[0]);
}

}  // namespace

}  // namespace tessera::testing
