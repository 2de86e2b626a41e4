// `tessera bench` where only some of the benchmarks are.

#include "support/temporary_folder.h"
#include "tools/shell_output.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace tessera::test {
namespace {

TEST(Bench, SaysWhichQuestionsAreNotInstalled) {
  const testing::TemporaryFolder folder;
  const auto tool = folder.path() / "tessera";
  std::filesystem::copy_file(TESSERA_TOOL, tool);
  for (const char* name : {"tessera-bench-save", "tessera-bench-comm"})
    std::ofstream(folder.path() / name);
  const auto ask = [&](const std::string& word) {
    return run_shell(quoted(tool.string()) + " bench " + word + " 2>&1");
  };
  const std::string known = "tessera bench: question: expected one of: comm, save; got ";
  const std::string end = "; see tessera bench --help\n";
  EXPECT_EQ(ask("nothing").text, known + "'nothing'" + end);
  for (const std::string question : {"train", "dtensor"}) {
    const auto result = ask(question);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.text, known + "'" + question +
                               "', which compares with Python programs of the repository and is "
                               "not installed; run it from a build of that (make build)" +
                               end);
  }
}

}  // namespace
}  // namespace tessera::test
