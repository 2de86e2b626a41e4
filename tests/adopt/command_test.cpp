// `tessera adopt` as a user runs it: files, folders, exit codes, what hostile input does.
#include "support/temporary_folder.h"
#include "tools/launched_tool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

using tessera::test::run_tool;
using tessera::test::ToolResult;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

namespace {

const std::string kBefore =
    "#include <torch/torch.h>\n\nstruct NetImpl : torch::nn::Module {\n  int forward(int);\n  "
    "torch::nn::Linear up{nullptr};\n};\nTORCH_MODULE(Net);\n";
const std::string kAfter =
    "#include <tessera/nn.h>\n#include <torch/torch.h>\n\nstruct NetImpl : torch::nn::Module {\n  "
    "int forward(int);\n  tessera::nn::Linear up{nullptr};\n};\nTESSERA_MODULE(Net);\n";

class AdoptCommand : public ::testing::Test {
 protected:
  fs::path write(const std::string& name, const std::string& text) const {
    const auto path = folder_.path() / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  static std::string read(const fs::path& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }
  static ToolResult adopt(std::vector<std::string> words, bool has_terminal = false) {
    words.insert(words.begin(), "adopt");
    return run_tool({.arguments = words, .has_terminal = has_terminal});
  }
  fs::path root() const { return folder_.path(); }

 private:
  tessera::testing::TemporaryFolder folder_;
};

}  // namespace

TEST_F(AdoptCommand, ShowsADiffAndWritesNothing) {
  const auto file = write("net.h", kBefore);
  const auto result = adopt({file});
  EXPECT_EQ(result.exit_code, 0);
  const auto name = file.string().substr(1);
  EXPECT_EQ(result.out,
            "--- a/" + name + "\n+++ b/" + name +
                "\n@@ -1,7 +1,8 @@\n+#include <tessera/nn.h>\n #include <torch/torch.h>\n"
                " \n struct NetImpl : torch::nn::Module {\n   int forward(int);\n-  "
                "torch::nn::Linear up{nullptr};\n+  tessera::nn::Linear up{nullptr};\n"
                " };\n-TORCH_MODULE(Net);\n+TESSERA_MODULE(Net);\n");
  EXPECT_THAT(result.err, HasSubstr("net.h:3: stays: torch::nn::Module: modules of both"));
  EXPECT_THAT(
      result.err,
      EndsWith("tessera adopt: 1 of 1 file would change, 2 places; --write changes them\n"));
  EXPECT_EQ(read(file), kBefore);
}

TEST_F(AdoptCommand, WritesOnce) {
  const auto file = write("net.h", kBefore);
  fs::permissions(file, fs::perms(0751));
  EXPECT_EQ(adopt({file, "--check"}).exit_code, 1);
  const auto result = adopt({file, "--write"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, file.string() + ": 2 places changed\n");
  EXPECT_EQ(read(file), kAfter);
  EXPECT_EQ(fs::status(file).permissions(), fs::perms(0751));
  const auto again = adopt({file, "--check"});
  EXPECT_EQ(again.exit_code, 0);
  EXPECT_EQ(again.out, "");
  EXPECT_THAT(again.err, EndsWith("tessera adopt: nothing to change in 1 file\n"));
  EXPECT_EQ(std::distance(fs::directory_iterator(root()), fs::directory_iterator()), 1);
}

TEST_F(AdoptCommand, ItsDiffIsAPatch) {
  std::string text = kBefore;
  for (int line = 0; line < 20; ++line) text += "int a" + std::to_string(line) + ";\n";
  const auto file = write("net.h", text + "torch::nn::GRU last;");
  const auto diff = write("change.diff", adopt({file}).out);
  const auto command = "cd / && patch -s -p1 < " + diff.string();
  if (std::system("command -v patch >/dev/null") != 0) GTEST_SKIP() << "no patch here";
  EXPECT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(read(file), kAfter + text.substr(kBefore.size()) + "tessera::nn::GRU last;");
}

TEST_F(AdoptCommand, ColoursOnATerminalAlone) {
  const auto file = write("net.h", kBefore + "torch::nn::GRU a; // \x1b]0;title\x07\n");
  const auto result = adopt({file}, /*has_terminal=*/true);
  EXPECT_THAT(result.out, HasSubstr("\x1b[32m+TESSERA_MODULE(Net);"));
  EXPECT_THAT(result.out, Not(HasSubstr("\x1b]0;")));
  EXPECT_THAT(adopt({file}).out, Not(HasSubstr("\x1b[32m")));
}

TEST_F(AdoptCommand, FoldersWithoutLinksBuildsAndHiddenOnes) {
  for (const char* name : {"src/a.cpp", "src/deep/b.cu", "src/c.hpp", "src/.git/d.h", "src/e.txt",
                           "src/build/f.cpp", "elsewhere.h"})
    write(name, kBefore);
  write("src/build/CMakeCache.txt", "");
  fs::create_symlink("../elsewhere.h", root() / "src/link.h");
  fs::create_directory_symlink("..", root() / "src/loop");
  const auto result = adopt({root() / "src", root() / "src/a.cpp", "--write"});
  EXPECT_THAT(result.err, AllOf(HasSubstr("changed 3 of 3 files, 6 places"),
                                HasSubstr("link.h: a link; name its file"),
                                HasSubstr("build: a folder of builds; name it to change it")));
  for (const char* name : {"src/a.cpp", "src/deep/b.cu", "src/c.hpp"})
    EXPECT_EQ(read(root() / name), kAfter) << name;
  for (const char* name : {"src/.git/d.h", "src/e.txt", "src/build/f.cpp", "elsewhere.h"})
    EXPECT_EQ(read(root() / name), kBefore) << name;
}

TEST_F(AdoptCommand, ANamedLinkChangesItsFile) {
  const auto file = write("net.h", kBefore);
  fs::create_symlink("net.h", root() / "link.h");
  EXPECT_EQ(adopt({root() / "link.h", "--write"}).exit_code, 0);
  EXPECT_TRUE(fs::is_symlink(root() / "link.h"));
  EXPECT_EQ(read(file), kAfter);
}

TEST_F(AdoptCommand, ErrorsNameFileAndLineAndNothingIsWritten) {
  const auto good = write("good.h", kBefore);
  const auto string = write("string.h", "int a;\nauto s = \"torch;\n");
  const auto binary = write("binary.cpp", std::string("\x7f"
                                                      "ELF\0\0",
                                                      6));
  const auto huge = write("huge.h", std::string(5 << 20, ' '));
  ASSERT_EQ(::mkfifo((root() / "pipe.h").c_str(), 0600), 0);
  const auto result =
      adopt({good, string, binary, huge, root() / "pipe.h", root() / "none.h", "--write"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.err,
      AllOf(HasSubstr("string.h:2: a string literal that begins here has no end"),
            HasSubstr("binary.cpp:1: a NUL byte"), HasSubstr("huge.h: has more than 4 MiB"),
            HasSubstr("pipe.h: expected a plain file"), HasSubstr("none.h: there is no such file"),
            HasSubstr("nothing was written; correct these files or leave them out")));
  EXPECT_EQ(read(good), kBefore);
  const auto shown = adopt({good, string});
  EXPECT_EQ(shown.exit_code, 1);
  EXPECT_THAT(shown.out, HasSubstr("+TESSERA_MODULE(Net);"));
}

TEST_F(AdoptCommand, FilesThatMayNotBeWrittenKeepAllOthers) {
  const auto first = write("a.h", kBefore);
  const auto locked = write("b.h", kBefore);
  fs::permissions(locked, fs::perms(0444));
  const auto result = adopt({first, locked, "--write"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("b.h: may not be written"));
  EXPECT_EQ(read(first), kBefore);
  EXPECT_EQ(std::distance(fs::directory_iterator(root()), fs::directory_iterator()), 2);
}

TEST_F(AdoptCommand, FilesOfSeveralNamesAreRefused) {
  const auto file = write("a.h", kBefore);
  fs::create_hard_link(file, root() / "b.h");
  EXPECT_THAT(adopt({file, "--write"}).err, HasSubstr("a.h: has several names (hard links)"));
  EXPECT_EQ(read(file), kBefore);
}

TEST_F(AdoptCommand, TheGuideShowsWhatItSays) {
  const auto guide = read(fs::path(TESSERA_SOURCE_DIR) / "docs/guide/moving.md");
  const std::string command = "$ tessera adopt net.h train.cpp\n";
  const auto begin = guide.find(command) + command.size();
  const auto shown = guide.substr(begin, guide.find("```", begin) - begin);
  std::string before;
  for (const auto& line : tessera::test::lines_of(shown.substr(shown.find(" @@\n") + 4))) {
    if (line.starts_with("net.h:")) break;
    if (!line.starts_with('+')) before += line.substr(1) + "\n";
  }
  const auto result = adopt({write("net.h", before), write("train.cpp", "#include \"net.h\"\n")});
  auto told = result.out + result.err;
  const auto folder = root().string();
  for (const auto& [start, kept] :
       {std::pair("a" + folder, 1), std::pair("b" + folder, 1), std::pair(folder + "/", 0)}) {
    for (auto at = told.find(start); at != std::string::npos; at = told.find(start))
      told.erase(at + static_cast<std::size_t>(kept),
                 start.size() - static_cast<std::size_t>(kept));
  }
  EXPECT_EQ(told, shown);
}

TEST_F(AdoptCommand, Usage) {
  EXPECT_EQ(adopt({}).exit_code, 2);
  const auto unknown = adopt({"a.h", "--wirte"});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("unknown option '--wirte', did you mean --write?"));
  EXPECT_EQ(adopt({"a.h", "--write", "--check"}).exit_code, 2);
  EXPECT_THAT(run_tool({.arguments = {"--help"}}).out, HasSubstr("adopt"));
}

TEST_F(AdoptCommand, HostileTextEndsSoon) {
  std::string text;
  for (int i = 0; i < 200000; ++i) text += "class < enum [ a::namespace using x = ";
  const auto file = write("a.h", text.substr(0, 1 << 20));
  EXPECT_LE(adopt({file}).exit_code, 1);
}
