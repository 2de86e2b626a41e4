// `tessera run`: what becomes of the lines that ranks write.

#include "tools/launched_tool.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <sstream>

namespace tessera::test {
namespace {

using Lines = std::vector<std::string>;

TEST(RunOutput, PutsTheRankBeforeEachLineAndKeepsTheStreamsApart) {
  const auto result = run_tool({shell_ranks({"-n", "2"}, "echo one; echo; echo two >&2")});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(sorted_lines(result.out), (Lines{"[0] ", "[0] one", "[1] ", "[1] one"}));
  EXPECT_EQ(sorted_lines(result.err), (Lines{"[0] two", "[1] two"}));
}

TEST(RunOutput, LeavesTheRankOutOnRequest) {
  const auto result = run_tool({shell_ranks({"-n", "2", "--no-prefix"}, "echo one; echo two >&2")});
  EXPECT_EQ(result.out, "one\none\n");
  EXPECT_EQ(result.err, "two\ntwo\n");
}

TEST(RunOutput, EndsALastLineThatHasNoNewline) {
  const auto result = run_tool({shell_ranks({"-n", "2"}, "printf 'no end'")});
  EXPECT_EQ(sorted_lines(result.out), (Lines{"[0] no end", "[1] no end"}));
  EXPECT_EQ(result.out.back(), '\n');
}

TEST(RunOutput, PassesEveryByteUnchanged) {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes.push_back(static_cast<char>(byte));
  bytes.push_back('x');
  EXPECT_EQ(run_tool({probe_ranks({"-n", "1", "--no-prefix"}, {"bytes"})}).out, bytes);

  bytes.insert(bytes.find('\n') + 1, "[0] ");
  EXPECT_EQ(run_tool({probe_ranks({"-n", "1"}, {"bytes"})}).out, "[0] " + bytes + "\n");
}

TEST(RunOutput, KeepsVeryLongLinesWhole) {
  constexpr std::size_t kLength = 3'000'000;
  const auto result = run_tool({probe_ranks({"-n", "3"}, {"line", std::to_string(kLength)})});
  EXPECT_TRUE(sorted_lines(result.out) ==
              (Lines{"[0] " + std::string(kLength, 'a'), "[1] " + std::string(kLength, 'b'),
                     "[2] " + std::string(kLength, 'c')}));
}

TEST(RunOutput, LetsARankRewriteItsOwnLineOnly) {
  LaunchedTool tool({.arguments = shell_ranks({"-n", "1", "--no-prefix"},
                                              "trap \"printf '\\033[1Athree\\n'; exit\" INT; "
                                              "printf 'one\\n\\033[1Atwo\\n'; "
                                              "while :; do sleep 0.01; done"),
                     .has_one_pipe = true});
  tool.rest_of_out_line("\033[1Atwo");
  tool.signal(SIGINT);
  EXPECT_EQ(lines_of(tool.wait().out),
            (Lines{"one", "\033[1Atwo",
                   "tessera run: SIGINT: passed on to all ranks (ctrl-C again kills them at once)",
                   "three"}));
}

/// That rank `rank` wrote lines 0, 1, … of `stream`, all whole.
void expect_all_lines(const Lines& lines, const std::string& stream, int rank, int count) {
  std::ostringstream prefix;
  prefix << "[" << rank << "] " << stream << " ";
  const std::string filler(static_cast<std::size_t>(20 + rank), '=');
  int next = 0;
  for (const auto& line : lines) {
    if (!line.starts_with(prefix.str())) continue;
    std::ostringstream expected;
    expected << prefix.str() << next << " " << filler << "|";
    ASSERT_EQ(line, expected.str());
    ++next;
  }
  EXPECT_EQ(next, count) << stream << " of rank " << rank;
}

TEST(RunOutput, NeverMixesLinesOfRanksThatFlood) {
  constexpr int kCount = 20'000;
  const auto result = run_tool({probe_ranks({"-n", "4"}, {"lines", std::to_string(kCount)})});
  const auto out = lines_of(result.out);
  const auto err = lines_of(result.err);
  EXPECT_EQ(out.size(), 4u * kCount);
  EXPECT_EQ(err.size(), 4u * kCount);
  for (int rank = 0; rank < 4; ++rank) {
    expect_all_lines(out, "out", rank, kCount);
    expect_all_lines(err, "err", rank, kCount);
  }
}

TEST(RunOutput, NeverMixesStdoutAndStderrThatGoToOnePipe) {
  constexpr int kCount = 20'000;
  const auto result =
      run_tool({.arguments = probe_ranks({"-n", "2"}, {"lines", std::to_string(kCount)}),
                .has_one_pipe = true});
  const auto lines = lines_of(result.out);
  EXPECT_EQ(lines.size(), 4u * kCount);
  for (int rank = 0; rank < 2; ++rank) {
    expect_all_lines(lines, "out", rank, kCount);
    expect_all_lines(lines, "err", rank, kCount);
  }
}

TEST(RunOutput, ShowsAQuietRankWhileAnotherFloods) {
  LaunchedTool tool({shell_ranks(
      {"-n", "2"},
      "[ $TESSERA_RANK = 1 ] && exec yes; read nothing; echo heard; exec sleep 1000")});
  tool.rest_of_out_line("[0] heard");
  tool.signal(SIGINT);
  EXPECT_EQ(tool.wait().exit_code, 128 + SIGINT);
}

TEST(RunOutput, HandlesSignalsWhileNobodyReadsAFlood) {
  LaunchedTool tool({shell_ranks({"-n", "1"}, "echo $$ >&2; exec yes")});
  const WatchedProcess rank(std::stoi(tool.rest_of_err_line("[0] ")));
  tool.signal(SIGTERM);
  EXPECT_TRUE(rank.ends());
  EXPECT_EQ(tool.wait().exit_code, 128 + SIGTERM);
}

TEST(RunOutput, EndsTheJobWhenItsReaderHasGone) {
  const auto result = run_tool({shell_ranks(
      {"-n", "1", "--no-prefix"},
      "{ " + std::string(TESSERA_TOOL) + " run -n 2 -- yes; echo $? >&2; } | head -n 1")});
  EXPECT_TRUE(result.out == "[0] y\n" || result.out == "[1] y\n") << result.out;
  EXPECT_EQ(result.err, std::to_string(128 + SIGPIPE) + "\n");
}

TEST(RunOutput, ColoursTheRankOnATerminal) {
  const auto result =
      run_tool({.arguments = shell_ranks({"-n", "2"}, "echo hello"), .has_terminal = true});
  EXPECT_EQ(sorted_lines(result.out),
            (Lines{"\033[33m[1]\033[0m hello\r", "\033[36m[0]\033[0m hello\r"}));
}

TEST(RunOutput, UsesNoColourWhereItIsNotWanted) {
  for (const char* setting : {"NO_COLOR=1", "TERM=dumb"}) {
    const auto result = run_tool({.arguments = shell_ranks({"-n", "1"}, "echo hello"),
                                  .environment = {setting},
                                  .has_terminal = true});
    EXPECT_EQ(result.out, "[0] hello\r\n") << setting;
  }
}

}  // namespace
}  // namespace tessera::test
