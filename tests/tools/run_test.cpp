// `tessera run`: what the ranks are given, and what the command line takes and refuses.

#include "tools/launched_tool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

namespace tessera::test {
namespace {

using Lines = std::vector<std::string>;

TEST(Run, TellsEveryRankWhoItIs) {
  const auto result = run_tool({shell_ranks(
      {"-n", "3"},
      "echo $TESSERA_RANK/$TESSERA_WORLD_SIZE $TESSERA_LOCAL_RANK/$TESSERA_LOCAL_WORLD_SIZE "
      "restart $TESSERA_RESTART_COUNT")});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(sorted_lines(result.out),
            (Lines{"[0] 0/3 0/3 restart 0", "[1] 1/3 1/3 restart 0", "[2] 2/3 2/3 restart 0"}));
  EXPECT_EQ(result.err, "");
}

TEST(Run, HandsRankZeroASocketThatListensAtTheStoresAddress) {
  const auto result = run_tool({probe_ranks({"-n", "4"}, {"store"})});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "[0] accepted 3\n");
}

TEST(Run, SharesTheCoresAmongTheRanksUnlessThreadsAreSet) {
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const auto threads_with = [](const std::string& ranks, const Lines& environment) {
    return run_tool({.arguments = shell_ranks({"--no-prefix", "-n", ranks},
                                              "[ $TESSERA_RANK != 0 ] || echo $OMP_NUM_THREADS"),
                     .environment = environment})
        .out;
  };
  EXPECT_EQ(threads_with("1", {}), std::to_string(cores) + "\n");
  EXPECT_EQ(threads_with("2", {}), std::to_string(std::max(1u, cores / 2)) + "\n");
  EXPECT_EQ(threads_with("7", {"OMP_NUM_THREADS=3"}), "3\n");
}

TEST(Run, SetsVariablesForAllRanks) {
  const auto result = run_tool(
      {.arguments = shell_ranks({"-n", "2", "--env", "A=[1,2] x=y", "--env", "B=", "--env=C=3"},
                                "echo \"$A|${B-unset}|$C|$D\""),
       .environment = {"A=old", "B=old", "D=kept"}});
  EXPECT_EQ(sorted_lines(result.out), (Lines{"[0] [1,2] x=y||3|kept", "[1] [1,2] x=y||3|kept"}));
}

TEST(Run, OverwritesWhatAnOuterRunHasSetAndLeavesOtherLaunchersVariables) {
  const auto result =
      run_tool({.arguments = shell_ranks({"-n", "2"},
                                         "echo $TESSERA_RANK $TESSERA_WORLD_SIZE "
                                         "${TESSERA_STORE_LISTEN_FD:+socket} $RANK $TESSERA_TORCH"),
                .environment = {"TESSERA_RANK=7", "TESSERA_WORLD_SIZE=9", "TESSERA_TORCH=here",
                                "TESSERA_STORE_LISTEN_FD=77", "RANK=5"}});
  EXPECT_EQ(sorted_lines(result.out), (Lines{"[0] 0 2 socket 5 here", "[1] 1 2 5 here"}));
}

TEST(Run, PassesTheProgramsWordsUnchanged) {
  const Lines words{"-n", "3", "--", "[a,b]", "", "run", "--help", "two words", "{}"};
  std::string expected;
  for (const auto& word : words) expected += "<" + word + ">\n";
  auto call = probe_ranks({"-n1", "--no-prefix"}, {"words"});
  call.insert(call.end(), words.begin(), words.end());
  EXPECT_EQ(run_tool({call}).out, expected);
  std::erase(call, "--");
  expected.erase(expected.find("<-->\n"), 5);
  EXPECT_EQ(run_tool({call}).out, expected) << "without -- before the program";
}

TEST(Run, SearchesTheProgramOnThePathThatIsSetForTheRanks) {
  const std::filesystem::path probe = TESSERA_RANK_PROBE;
  const auto result = run_tool({{"run", "-n", "1", "--env", "PATH=" + probe.parent_path().string(),
                                 probe.filename().string(), "words", "found"}});
  EXPECT_EQ(result.out, "[0] <found>\n") << result.err;
}

TEST(Run, GivesStdinToRankZeroAlone) {
  const auto result =
      run_tool({.arguments = shell_ranks({"-n", "3"}, "cat; echo end"), .input = "to rank 0\n"});
  EXPECT_EQ(sorted_lines(result.out), (Lines{"[0] end", "[0] to rank 0", "[1] end", "[2] end"}));
}

TEST(Run, GivesNoRankATerminalAsStdin) {
  const auto result = run_tool(
      {.arguments = shell_ranks({"-n", "1"}, "cat; [ -t 0 ] || echo end"), .has_terminal = true});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("end"), std::string::npos);
}

TEST(Run, WorksWithoutStandardDescriptors) {
  const auto result = run_tool({shell_ranks(
      {"-n", "1", "--no-prefix"},
      std::string(TESSERA_TOOL) + " run -n 2 -- sh -c 'exit 5' <&- >&- 2>&-; echo inner $?")});
  EXPECT_EQ(result.out, "inner 5\n");
}

TEST(Run, StartsAgainAfterAFailureWithANewStore) {
  const auto result =
      run_tool({shell_ranks({"-n", "2", "--max-restarts", "3", "--restart-delay", "0"},
                            "[ $TESSERA_RESTART_COUNT = 2 ] && exec " TESSERA_RANK_PROBE
                            " store; [ $TESSERA_RANK = 0 ] && exec sleep 1000; exit 4")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "[0] accepted 1\n");
  const auto said = lines_of(result.err);
  ASSERT_EQ(said.size(), 2u) << result.err;
  EXPECT_TRUE(said[0].starts_with("tessera run: rank 1 of 2 failed with exit code 4 after "));
  EXPECT_TRUE(said[0].ends_with(" s; restart 1 of 3")) << said[0];
  EXPECT_TRUE(said[1].ends_with(" s; restart 2 of 3")) << said[1];
}

TEST(Run, ReportsTheLastFailureWhenRestartsAreUsedUp) {
  const auto result = run_tool(
      {shell_ranks({"-n", "1", "--max-restarts", "2", "--restart-delay", "0"},
                   "echo attempt $TESSERA_RESTART_COUNT; exit $((40 + TESSERA_RESTART_COUNT))")});
  EXPECT_EQ(result.exit_code, 42);
  EXPECT_EQ(result.out, "[0] attempt 0\n[0] attempt 1\n[0] attempt 2\n");
  EXPECT_EQ(lines_of(result.err).back(), "[0] attempt 2");
}

TEST(Run, IsNotStartedAgainAfterAFinalExitCode) {
  const auto result = run_tool(
      {shell_ranks({"-n", "1", "--max-restarts", "5", "--restart-delay", "0", "--no-restart-on",
                    "7", "--no-restart-on", "8"},
                   "echo attempt $TESSERA_RESTART_COUNT; exit $((6 + TESSERA_RESTART_COUNT))")});
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_EQ(result.out, "[0] attempt 0\n[0] attempt 1\n");
  EXPECT_EQ(lines_of(result.err).back(), "[0] attempt 1");
}

TEST(Run, PrintsItsVersion) {
  const auto result = run_tool({{"--version"}});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(result.out.starts_with("tessera ")) << result.out;
}

TEST(Run, ShowsItsDefaultsInItsHelp) {
  const auto result = run_tool({{"run", "--help"}});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  // "=5" or "[5]", as the version of CLI11 has it.
  EXPECT_TRUE(testing::internal::RE::PartialMatch(result.out, "--grace [^\n]*5")) << result.out;
  EXPECT_TRUE(testing::internal::RE::PartialMatch(result.out, "--max-restarts [^\n]*0"))
      << result.out;
  EXPECT_EQ(result.out.find('{'), std::string::npos) << result.out;
}

TEST(Bench, ShowsItsHelp) {
  const auto result = run_tool({{"bench", "--help"}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("--ranks"), std::string::npos) << result.out;
}

struct Refusal {
  const char* name;
  Lines arguments;
  int exit_code;
  std::string message;  // its beginning
};

std::ostream& operator<<(std::ostream& stream, const Refusal& refusal) {
  return stream << refusal.name;
}

class RunRefuses : public testing::TestWithParam<Refusal> {};

TEST_P(RunRefuses, WithOneLineAndItsExitCode) {
  const auto result = run_tool({GetParam().arguments});
  EXPECT_EQ(result.exit_code, GetParam().exit_code);
  EXPECT_EQ(result.out, "");
  EXPECT_TRUE(result.err.starts_with(GetParam().message)) << result.err;
  EXPECT_EQ(lines_of(result.err).size(), 1u) << result.err;
}

INSTANTIATE_TEST_SUITE_P(
    CommandLines, RunRefuses,
    testing::Values(Refusal{"NoRanks",
                            {"run", "-n", "0", "true"},
                            2,
                            "tessera run: --ranks: expected a number from 1 to 4096, got '0'"},
                    Refusal{"RanksThatAreNoNumber",
                            {"run", "-n", "two", "true"},
                            2,
                            "tessera run: --ranks: expected a number from 1 to 4096, got 'two'"},
                    Refusal{"MissingRanks", {"run", "true"}, 2, "tessera run: --ranks is required"},
                    Refusal{"MissingProgram",
                            {"run", "-n", "2"},
                            2,
                            "tessera run: program: expected -- PROGRAM"},
                    Refusal{"SettingWithoutValue",
                            {"run", "-n", "2", "--env", "HOME", "true"},
                            2,
                            "tessera run: --env: expected NAME=VALUE, got 'HOME'"},
                    Refusal{"SettingWithoutName",
                            {"run", "-n", "2", "--env", "=1", "true"},
                            2,
                            "tessera run: --env: expected NAME=VALUE, got '=1'"},
                    Refusal{"SettingOfARanksIdentity",
                            {"run", "-n", "2", "--env", "TESSERA_RANK=1", "true"},
                            2,
                            "tessera run: --env: TESSERA_RANK is set by tessera run itself"},
                    Refusal{"NegativeRestarts",
                            {"run", "-n", "2", "--max-restarts=-1", "true"},
                            2,
                            "tessera run: --max-restarts: expected a number from 0"},
                    Refusal{"NegativeGrace",
                            {"run", "-n", "2", "--grace=-1", "true"},
                            2,
                            "tessera run: --grace: expected a number from 0"},
                    Refusal{"UnknownOption",
                            {"run", "-n", "2", "--ppn", "true"},
                            2,
                            "tessera run: unknown option '--ppn', expected one of --help, -h, "},
                    Refusal{"OptionOfAnotherLauncher",
                            {"run", "--nproc-per-node", "2", "--", "true"},
                            2,
                            "tessera run: unknown option '--nproc-per-node', did you mean "
                            "--ranks?; see tessera run --help"},
                    Refusal{"MistypedOption",
                            {"run", "-n", "2", "--max-restart=3", "true"},
                            2,
                            "tessera run: unknown option '--max-restart=3', did you mean "
                            "--max-restarts?; see tessera run --help"},
                    Refusal{"OptionWithoutItsValue",
                            {"run", "-n"},
                            2,
                            "tessera run: expected a value after --ranks; see tessera run --help"},
                    Refusal{"MistypedSubcommand",
                            {"runn", "-n", "2", "true"},
                            2,
                            "tessera: unknown subcommand 'runn', did you mean run?; see tessera "
                            "--help"},
                    Refusal{"StrangeSubcommand",
                            {"launch"},
                            2,
                            "tessera: unknown subcommand 'launch', expected one of run, train, "
                            "inspect, bench, report"},
                    Refusal{"MistypedOptionOfTheProgram",
                            {"--hepl"},
                            2,
                            "tessera: unknown option '--hepl', did you mean --help?"},
                    Refusal{"OptionWithoutItsSubcommand",
                            {"-n", "2", "true"},
                            2,
                            "tessera: unknown option '-n', expected one of --help, -h, --version"},
                    Refusal{"NoSubcommand",
                            {},
                            2,
                            "tessera: expected one of the subcommands run, train, inspect, bench, "
                            "report, adopt, export, tokenize; see tessera"},
                    Refusal{"UnknownProgram",
                            {"run", "-n", "3", "--", "no-such-program"},
                            127,
                            "tessera run: program 'no-such-program' not found; give its path "},
                    Refusal{"UnknownPath",
                            {"run", "-n", "3", "--", "/no/such/program"},
                            127,
                            "tessera run: program '/no/such/program' not found; check the path"},
                    Refusal{"FileThatIsNoProgram",
                            {"run", "-n", "3", "--", "/etc/passwd"},
                            126,
                            "tessera run: program '/etc/passwd' is not executable"},
                    Refusal{"Directory",
                            {"run", "-n", "3", "--", "/etc"},
                            126,
                            "tessera run: program '/etc' is a directory"}),
    [](const auto& instance) { return std::string(instance.param.name); });

TEST(Run, NamesAScriptWhoseInterpreterIsMissing) {
  const std::string path = testing::TempDir() + "/tessera_script_" + std::to_string(::getpid());
  std::ofstream(path) << "#!/no/such/interpreter\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  const auto result = run_tool({{"run", "-n", "1", "--max-restarts", "2", "--", path}});
  std::filesystem::remove(path);
  EXPECT_EQ(result.exit_code, 126);
  EXPECT_EQ(result.err, "tessera run: program '" + path +
                            "' needs an interpreter that does not exist; check its first line\n");
}

}  // namespace
}  // namespace tessera::test
