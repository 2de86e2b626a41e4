// `tessera run`: how a job ends, by a failure, by a signal or by the launcher's own death.

#include "tools/launched_tool.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>

namespace tessera::test {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(RunFailure, EndsWithTheFailingRanksMessageAndExitCode) {
  const auto result = run_tool({shell_ranks(
      {"-n", "4"},
      "echo out; [ $TESSERA_RANK = 2 ] && { echo cause >&2; echo detail >&2; exit 3; }; "
      "exec sleep 1000")});
  EXPECT_EQ(result.exit_code, 3);
  const auto said = lines_of(result.err);
  ASSERT_EQ(said.size(), 5u) << result.err;
  EXPECT_TRUE(said[2].starts_with("tessera run: rank 2 of 4 failed with exit code 3 after "));
  EXPECT_TRUE(said[2].ends_with(" s; its last lines:")) << said[2];
  EXPECT_EQ(said[3], "[2] cause");
  EXPECT_EQ(said[4], "[2] detail");
}

TEST(RunFailure, ShowsTheLastTwentyLines) {
  const auto result = run_tool({shell_ranks(
      {"-n", "1"}, "i=0; while [ $i -lt 50 ]; do echo $i >&2; i=$((i + 1)); done; exit 1")});
  const auto said = lines_of(result.err);
  ASSERT_EQ(said.size(), 50u + 1 + 20);
  EXPECT_EQ(said[51], "[0] 30");
  EXPECT_EQ(said.back(), "[0] 49");
}

TEST(RunFailure, ShowsStdoutOfARankWithoutStderr) {
  const auto result = run_tool({shell_ranks({"-n", "1"}, "echo last words; exit 1")});
  EXPECT_EQ(lines_of(result.err).back(), "[0] last words");
}

TEST(RunFailure, DoesNotRepeatProgressOfARankThatWasKilled) {
  const auto result = run_tool({shell_ranks({"-n", "1"}, "echo step 1; kill -KILL $$")});
  EXPECT_TRUE(contains(result.err, " s; it was killed from outside")) << result.err;
  EXPECT_FALSE(contains(result.err, "step 1")) << result.err;
}

TEST(RunFailure, LeavesOutLinesThatRewriteThemselves) {
  const auto result = run_tool({shell_ranks(
      {"-n", "1"}, "printf 'step 1\\n\\033[1A\\033[2Kstep 2\\n' >&2; echo cause >&2; exit 1")});
  const auto said = lines_of(result.err);
  EXPECT_EQ(said.back(), "[0] cause");
  EXPECT_EQ(said[said.size() - 2], "[0] step 1");
}

TEST(RunFailure, AddsNothingToTheWordsOfARankWithAQuietCode) {
  const auto result =
      run_tool({shell_ranks({"-n", "1", "--quiet-on", "7"}, "echo cause >&2; exit 7")});
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_EQ(result.err, "[0] cause\n");
}

TEST(RunFailure, SaysThatARankWroteNothing) {
  const auto result = run_tool({shell_ranks({"-n", "1"}, "exit 1")});
  EXPECT_TRUE(contains(result.err, " s; it wrote nothing\n")) << result.err;
}

TEST(RunFailure, NamesTheSignalThatEndedARank) {
  const auto result = run_tool({shell_ranks({"-n", "2"}, "kill -SEGV $$")});
  EXPECT_EQ(result.exit_code, 128 + SIGSEGV);
  EXPECT_TRUE(contains(result.err, " of 2 failed with SIGSEGV (exit code 139) after "))
      << result.err;
}

TEST(RunFailure, BlamesTheRankThatFailedFirstEvenIfTheLauncherWakesLate) {
  const Fifo go_1("go_1");
  const Fifo go_2("go_2");
  const auto fifo = "[ $TESSERA_RANK = 1 ] && fifo=" + go_1.path() + " || fifo=" + go_2.path();
  LaunchedTool tool(
      {shell_ranks({"-n", "3"}, "[ $TESSERA_RANK = 0 ] && exec sleep 1000; " + fifo +
                                    "; echo $$; read go < $fifo; exit $((10 + TESSERA_RANK))")});
  const WatchedProcess rank_1(std::stoi(tool.rest_of_out_line("[1] ")));
  const WatchedProcess rank_2(std::stoi(tool.rest_of_out_line("[2] ")));
  tool.signal(SIGSTOP);
  tool.wait_until_stopped();
  go_2.write_line();
  ASSERT_TRUE(rank_2.ends());
  go_1.write_line();
  ASSERT_TRUE(rank_1.ends());
  tool.signal(SIGCONT);
  const auto result = tool.wait();
  EXPECT_EQ(result.exit_code, 12);
  EXPECT_TRUE(contains(result.err, "rank 2 of 3 failed with exit code 12")) << result.err;
}

TEST(RunFailure, KillsRanksThatIgnoreTheRequestToEnd) {
  const Fifo go("go");
  LaunchedTool tool(
      {shell_ranks({"-n", "2", "--grace", "0.05"},
                   "[ $TESSERA_RANK = 0 ] && exec " TESSERA_RANK_PROBE " persist; read go < " +
                       go.path() + "; exit 9")});
  tool.rest_of_out_line("[0] pid ");
  go.write_line();
  const auto result = tool.wait();
  EXPECT_EQ(result.exit_code, 9);
  const auto said = lines_of(result.err);
  ASSERT_EQ(said.size(), 2u) << result.err;
  EXPECT_EQ(said[0], "tessera run: rank 0 had not ended after SIGTERM; killed");
  EXPECT_TRUE(said[1].starts_with("tessera run: rank 1 of 2 failed with exit code 9")) << said[1];
}

TEST(RunFailure, GivesTheGraceAlsoToAProgramWhoseWrapperDiesAtOnce) {
  const Fifo go("go");
  const Fifo release("release");
  LaunchedTool tool({shell_ranks({"-n", "2", "--grace", "50"},
                                 "[ $TESSERA_RANK = 1 ] && read go < " + go.path() +
                                     " && exit 6; echo wrapper $$; " TESSERA_RANK_PROBE " save " +
                                     release.path() + " & wait")});
  const WatchedProcess wrapper(std::stoi(tool.rest_of_out_line("[0] wrapper ")));
  tool.rest_of_out_line("[0] ready");
  go.write_line();
  ASSERT_TRUE(wrapper.ends());
  release.write_line();
  const auto result = tool.wait();
  EXPECT_EQ(result.exit_code, 6);
  EXPECT_EQ(lines_of(result.out).back(), "[0] saved");
  EXPECT_FALSE(contains(result.err, "killed")) << result.err;
}

class RunSignal : public testing::TestWithParam<int> {};

TEST_P(RunSignal, ReachesEveryRankAndBecomesTheExitCode) {
  LaunchedTool tool({probe_ranks({"-n", "3", "--grace", "50"}, {"signals"})});
  for (const char* rank : {"[0] ", "[1] ", "[2] "})
    tool.rest_of_out_line(rank + std::string("ready"));
  const std::string name = std::string("SIG") + ::sigabbrev_np(GetParam());
  tool.signal(GetParam());
  for (const char* rank : {"[0] ", "[1] ", "[2] "}) tool.rest_of_out_line(rank + name);
  if (GetParam() != SIGTERM) tool.signal(SIGTERM);
  const auto result = tool.wait();
  EXPECT_EQ(result.exit_code, 128 + GetParam());
  EXPECT_TRUE(result.err.starts_with("tessera run: " + name + ": passed on to all ranks"));
  EXPECT_FALSE(contains(result.err, "failed")) << result.err;
}

INSTANTIATE_TEST_SUITE_P(Ending, RunSignal, testing::Values(SIGINT, SIGTERM, SIGHUP, SIGQUIT),
                         [](const auto& instance) {
                           return std::string("SIG") + ::sigabbrev_np(instance.param);
                         });

TEST(RunSignals, ForwardsUserSignalsAndGoesOn) {
  LaunchedTool tool({probe_ranks({"-n", "2"}, {"signals"})});
  for (const char* rank : {"[0] ", "[1] "}) tool.rest_of_out_line(rank + std::string("ready"));
  tool.signal(SIGUSR1);
  for (const char* rank : {"[0] ", "[1] "}) tool.rest_of_out_line(rank + std::string("SIGUSR1"));
  tool.signal(SIGUSR2);
  for (const char* rank : {"[0] ", "[1] "}) tool.rest_of_out_line(rank + std::string("SIGUSR2"));
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait().exit_code, 128 + SIGTERM);
}

TEST(RunSignals, StopsAndContinuesWithItsRanks) {
  const Fifo fifo("signals");
  LaunchedTool tool({probe_ranks({"-n", "1"}, {"signals", fifo.path()})});
  tool.rest_of_out_line("[0] ready");
  tool.signal(SIGTSTP);
  EXPECT_EQ(fifo.read_line(), "SIGTSTP");
  tool.wait_until_stopped();
  tool.signal(SIGCONT);
  tool.rest_of_out_line("[0] SIGCONT");
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait().exit_code, 128 + SIGTERM);
}

TEST(RunSignals, KillsAtOnceOnTheSecondCtrlC) {
  LaunchedTool tool({probe_ranks({"-n", "2", "--grace", "1000"}, {"persist"})});
  for (const char* rank : {"[0] ", "[1] "}) tool.rest_of_out_line(rank + std::string("pid "));
  tool.signal(SIGINT);
  tool.rest_of_err_line("tessera run: SIGINT: passed on");
  tool.signal(SIGINT);
  const auto result = tool.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_EQ(lines_of(result.err).back(),
            "tessera run: ranks 0, 1 had not ended after SIGINT; killed");
}

TEST(RunSignals, KillsAfterTheGrace) {
  LaunchedTool tool({probe_ranks({"-n", "2", "--grace", "0.05"}, {"persist"})});
  for (const char* rank : {"[0] ", "[1] "}) tool.rest_of_out_line(rank + std::string("pid "));
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait().exit_code, 128 + SIGKILL);
}

TEST(RunSignals, LeaveTheExitCodeToARankThatSpeaksForTheJob) {
  for (const char* code : {"7", "8"}) {  // 8 is any failure of a rank that was told to end
    LaunchedTool tool(
        {shell_ranks({"-n", "2", "--no-restart-on", "7", "--quiet-on", "7"},
                     "[ $TESSERA_RANK = 1 ] && trap 'exit " + std::string(code) +
                         "' TERM; echo up; while :; do sleep 0.05; done 2> /dev/null")});
    for (const char* rank : {"[0] ", "[1] "}) tool.rest_of_out_line(rank + std::string("up"));
    tool.signal(SIGTERM);
    const auto result = tool.wait();
    EXPECT_EQ(result.exit_code, *code == '7' ? 7 : 128 + SIGTERM) << result.err;
    EXPECT_EQ(lines_of(result.err).size(), 1u) << result.err;
  }
}

TEST(RunSignals, OfAnOutputAtItsLimitEndNoJob) {
  const auto result = run_tool({shell_ranks(
      {"-n", "1"}, "out=$(mktemp); ulimit -f 1; " TESSERA_TOOL
                   " run -n 1 -- sh -c 'head -c 100000 /dev/zero; exit 9' > $out 2> /dev/null; "
                   "code=$?; rm $out; exit $code")});
  EXPECT_EQ(result.exit_code, 9) << result.err;
}

TEST(RunSignals, TakesCtrlCFromTheTerminal) {
  LaunchedTool tool({.arguments = shell_ranks({"-n", "2"}, "echo up; exec sleep 1000"),
                     .environment = {"NO_COLOR=1"},
                     .has_terminal = true});
  for (const char* rank : {"[0] ", "[1] "}) tool.rest_of_out_line(rank + std::string("up"));
  tool.type("\x03");
  EXPECT_EQ(tool.wait().exit_code, 128 + SIGINT);
}

TEST(RunSignals, IgnoresAHangupUnderNohup) {
  LaunchedTool tool(
      {{"run", "-n", "1", "--no-prefix", "--", "sh", "-c",
        "trap '' HUP; exec " TESSERA_TOOL
        " run -n 1 -- sh -c 'echo parent $PPID; exec " TESSERA_RANK_PROBE " signals'"}});
  const pid_t inner = std::stoi(tool.rest_of_out_line("[0] parent "));
  tool.rest_of_out_line("[0] ready");
  const WatchedProcess launcher(inner);
  ASSERT_EQ(::kill(inner, SIGHUP), 0);
  ASSERT_EQ(::kill(inner, SIGTERM), 0);
  EXPECT_TRUE(launcher.ends());
  const auto result = tool.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
  EXPECT_FALSE(contains(result.err, "SIGHUP")) << result.err;
}

TEST(RunStopped, TellsAndKillsARankThatIsStopped) {
  const auto result =
      run_tool({shell_ranks({"-n", "2", "--stopped-timeout", "3"},
                            "[ $TESSERA_RANK = 0 ] || kill -STOP $$; exec sleep 1000")});
  EXPECT_EQ(result.exit_code, 128 + SIGKILL) << result.err;
  EXPECT_TRUE(contains(result.err, "tessera run: rank 1 (process ")) << result.err;
  EXPECT_TRUE(contains(result.err,
                       ") is stopped (SIGSTOP or a debugger); unless it goes on it is killed "
                       "after 3 s (--stopped-timeout)"))
      << result.err;
  EXPECT_TRUE(contains(result.err, ") has been stopped for 3 s; killed")) << result.err;
  EXPECT_TRUE(contains(result.err, "rank 1 of 2 failed with SIGKILL")) << result.err;
  EXPECT_TRUE(contains(result.err, "; it was stopped")) << result.err;
}

TEST(RunStopped, IsStartedAgain) {
  const auto result = run_tool({shell_ranks(
      {"-n", "1", "--stopped-timeout", "1", "--max-restarts", "1", "--restart-delay", "0"},
      "[ $TESSERA_RESTART_COUNT = 1 ] || kill -STOP $$; echo attempt $TESSERA_RESTART_COUNT")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "[0] attempt 1\n");
}

TEST(RunStopped, LetsARankGoOnThatWasStopped) {
  LaunchedTool tool(
      {shell_ranks({"-n", "1", "--stopped-timeout", "0"},
                   "echo pid $$; kill -STOP $$; echo $TESSERA_STOPPED_TIMEOUT_MS; read line")});
  const pid_t rank = std::stoi(tool.rest_of_out_line("[0] pid "));
  EXPECT_EQ(tool.rest_of_err_line("tessera run: rank 0 (process " + std::to_string(rank)),
            ") is stopped (SIGSTOP or a debugger)");
  ::kill(rank, SIGCONT);
  tool.rest_of_out_line("[0] 0");
  tool.wait();
}

TEST(RunStopped, EndsAtOnceWhenToldTo) {
  LaunchedTool tool({shell_ranks({"-n", "2", "--grace", "1000"},
                                 "trap 'echo saved; exit 0' TERM; echo up $TESSERA_RANK; "
                                 "[ $TESSERA_RANK = 0 ] || kill -STOP $$; "
                                 "while :; do sleep 0.1; done")});
  tool.rest_of_out_line("[0] up");
  tool.rest_of_err_line("tessera run: rank 1 (process ");
  tool.signal(SIGTERM);
  const auto result = tool.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
  EXPECT_TRUE(contains(result.out, "[1] saved")) << result.out;
}

TEST(RunRestarts, TakeTimeThatGrows) {
  const auto begun = std::chrono::steady_clock::now();
  const auto result = run_tool(
      {shell_ranks({"-n", "1", "--max-restarts", "3", "--restart-delay", "0.2"}, "exit 4")});
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_GE(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(1400));
  for (const char* text :
       {"; restart 1 of 3 in 0.2 s", "; restart 2 of 3 in 0.4 s", "; restart 3 of 3 in 0.8 s"})
    EXPECT_TRUE(contains(result.err, text)) << result.err;
}

TEST(RunRestarts, EndAtOnceWhenToldTo) {
  LaunchedTool tool(
      {shell_ranks({"-n", "1", "--max-restarts", "3", "--restart-delay", "1000"}, "exit 4")});
  tool.rest_of_err_line("tessera run: rank 0 of 1 failed");
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait().exit_code, 128 + SIGTERM);
}

TEST(RunSignals, DoesNotStartAgainAfterASignal) {
  LaunchedTool tool({shell_ranks({"-n", "2", "--max-restarts", "5"}, "echo up; exec sleep 1000")});
  for (const char* rank : {"[0] ", "[1] "}) tool.rest_of_out_line(rank + std::string("up"));
  tool.signal(SIGINT);
  const auto result = tool.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_FALSE(contains(result.err, "restart")) << result.err;
}

}  // namespace
}  // namespace tessera::test
