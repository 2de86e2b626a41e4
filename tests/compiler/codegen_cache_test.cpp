// Compiling, loading and keeping programs: across processes, with damaged entries, without a
// compiler, in folders that are not safe.
#include <tessera/compile.h>

#include "cached_answers.h"
#include "compiler/kernels/kernel_cache.h"
#include "support/subprocess.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <thread>

namespace tessera::compiler {
namespace {

using std::chrono::milliseconds;

TEST_F(CodegenCache, CompilesOnceForManyLoads) {
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(compilations(), 1);
  struct stat found{};
  ASSERT_EQ(stat(cache_.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0700U);
  std::string why;
  const auto first = HostLibrary::load(source_of(42), &why);
  EXPECT_EQ(first, HostLibrary::load(source_of(42), &why));
  EXPECT_EQ(first->symbol("question"), nullptr);
}

TEST_F(CodegenCache, KeepsProgramsApart) {
  std::string why;
  const auto other = HostLibrary::load(source_of(41), &why);
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(answer_of(other), 41);
  EXPECT_EQ(compilations(), 2);
}

TEST_F(CodegenCache, RebuildsADamagedEntry) {
  EXPECT_EQ(load_answer(), 42);
  const auto library = only_library();
  const auto size = fs::file_size(library);
  fs::resize_file(library, size / 2);
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(compilations(), 2);

  std::fstream file(library, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(size / 3));
  file.put('\x5a').put('\xa5');
  file.close();
  EXPECT_FALSE(cache_entry::is_sound(library));
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(compilations(), 3);
  EXPECT_TRUE(cache_entry::is_sound(library));
}

TEST_F(CodegenCache, DoesNotLoadAnEntryThatOthersMayWrite) {
  EXPECT_EQ(load_answer(), 42);
  fs::permissions(only_library(), fs::perms::others_write, fs::perm_options::add);
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(compilations(), 2);
}

/// What a child process of the next test does.
TEST_F(CodegenCache, DISABLED_LoadsInAChild) {
  setenv("TESSERA_CACHE", std::getenv("SHARED_CACHE"), 1);
  setenv("CXX", std::getenv("SHARED_CXX"), 1);
  EXPECT_EQ(load_answer(), 42);
}

TEST_F(CodegenCache, CompilesOnceForProcessesThatAskTogether) {
  const testing::SubprocessOptions options{
      .arguments = {fs::read_symlink("/proc/self/exe"),
                    "--gtest_filter=CodegenCache.DISABLED_LoadsInAChild",
                    "--gtest_also_run_disabled_tests"},
      .environment = {{"SHARED_CACHE", cache_}, {"SHARED_CXX", std::getenv("CXX")}},
      .output = folder_.path() / "output"};
  std::vector<testing::Subprocess> children;
  for (int i = 0; i < 3; ++i) children.emplace_back(options);
  for (auto& child : children) {
    const auto status = child.wait(std::chrono::seconds(60));
    ASSERT_TRUE(status);
    EXPECT_TRUE(status->ok()) << status->text() << child.output();
  }
  EXPECT_EQ(compilations(), 1);
  for (const auto& entry : fs::directory_iterator(cache_)) {
    const auto name = entry.path().filename().string();
    EXPECT_EQ(std::count(name.begin(), name.end(), '.'), 1) << "a draft was left: " << name;
  }
}

TEST_F(CodegenCache, NamesTheHolderOfALockThatIsNotFreed) {
  EXPECT_EQ(load_answer(), 42);
  const auto library = only_library();
  fs::resize_file(library, 10);
  std::string why;
  const auto folder = PrivateFolder::open(cache_, why);
  ASSERT_TRUE(folder) << why;
  const std::string name = fs::path(library).stem().string() + ".lock";
  const auto held = FileLock::take(*folder, name, milliseconds(0), &why);
  ASSERT_TRUE(held) << why;
  EXPECT_EQ(HostLibrary::load(source_of(42), &why, milliseconds(30)), nullptr);
  EXPECT_NE(why.find("held by process " + std::to_string(getpid())), std::string::npos) << why;
  EXPECT_NE(why.find("30 ms"), std::string::npos) << why;
}

TEST_F(CodegenCache, UsesAnotherFolderWhereTheWantedOneIsNotSafe) {
  fs::create_directory(cache_);
  fs::permissions(cache_, fs::perms::all);
  EXPECT_EQ(load_answer(), 42);
  EXPECT_TRUE(fs::is_empty(cache_));
  std::string used;
  {
    std::string why;
    const auto folder = open_cache(&why);
    ASSERT_TRUE(folder) << why;
    used = folder->path();
    EXPECT_NE(used, cache_);
  }
  EXPECT_FALSE(fs::exists(used));
}

/// The folder that tokens and programs share may have been made by anybody, under any umask.
TEST_F(CodegenCache, IsPrivateInAFolderThatTheGroupMayWriteTo) {
  const fs::path home = folder_.path() / "home";
  fs::create_directories(home / ".cache" / "tessera" / "tokens");
  for (const auto& above : {home / ".cache", home / ".cache" / "tessera"})
    fs::permissions(above, fs::perms::owner_all | fs::perms::group_all);
  const Variables variables({{"TESSERA_CACHE", ""}, {"XDG_CACHE_HOME", ""}, {"HOME", home}});
  const mode_t before = umask(0002);
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(load_answer(), 42);
  umask(before);
  EXPECT_EQ(compilations(), 1);
  struct stat found{};
  ASSERT_EQ(stat((home / ".cache" / "tessera" / "programs").c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0700U);
}

TEST_F(CodegenCache, IsInTheTemporaryFolderWithoutAHome) {
  const Variables variables(
      {{"TESSERA_CACHE", ""}, {"XDG_CACHE_HOME", ""}, {"HOME", ""}, {"TMPDIR", folder_.path()}});
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(compilations(), 1);
  const auto own = folder_.path() / ("tessera-" + std::to_string(geteuid()) + "-programs");
  ASSERT_TRUE(fs::is_directory(own));
  // A link that somebody has put there first is not followed.
  fs::remove_all(own);
  fs::create_directory(folder_.path() / "others");
  fs::create_directory_symlink(folder_.path() / "others", own);
  EXPECT_EQ(load_answer(), 42);
  EXPECT_TRUE(fs::is_empty(folder_.path() / "others"));
}

TEST_F(CodegenCache, SaysWhatIsMissingWithoutACompiler) {
  std::string why;
  {
    const Variables variables({{"CXX", ""}, {"PATH", folder_.path() / "empty"}});
    EXPECT_EQ(HostLibrary::load(source_of(42), &why), nullptr);
    EXPECT_EQ(why,
              "no C++ compiler: none of c++, g++ and clang++ is on PATH, and CXX is unset; "
              "name a compiler by CXX");
  }
  const Variables variables({std::pair("CXX", "no-such-compiler -m64")});
  EXPECT_EQ(HostLibrary::load(source_of(42), &why), nullptr);
  EXPECT_EQ(why,
            "no C++ compiler: CXX='no-such-compiler -m64' is not an executable program; "
            "name a compiler by CXX");
}

/// What the child process of the next test does.
TEST_F(CodegenCache, DISABLED_InterpretsInAChild) {
  const Variables variables({std::pair("CXX", "no-such-compiler")});
  for (int i = 0; i < 2; ++i)
    codegen(
        Graph::parse("input %0: float32[4] = argument \"x\"\n"
                     "%1: float32[4] = aten::neg(%0)\n%2: float32[4] = aten::exp(%1)\n"
                     "return %2\n"));
}

TEST_F(CodegenCache, WarnsOnceThatProgramsAreInterpreted) {
  testing::Subprocess child(
      {.arguments = {fs::read_symlink("/proc/self/exe"),
                     "--gtest_filter=CodegenCache.DISABLED_InterpretsInAChild",
                     "--gtest_also_run_disabled_tests"},
       .output = folder_.path() / "output"});
  const auto status = child.wait(std::chrono::seconds(60));
  const auto output = child.output();
  ASSERT_TRUE(status && status->ok()) << output;
  const std::string warning =
      "compile: programs are interpreted, without kernels of their own: no C++ compiler: "
      "CXX='no-such-compiler' is not an executable program; name a compiler by CXX";
  EXPECT_NE(output.find(warning), std::string::npos) << output;
  EXPECT_EQ(output.find(warning), output.rfind(warning)) << output;
}

TEST_F(CodegenCache, SaysWhatTheCompilerSaid) {
  std::string why;
  EXPECT_EQ(HostLibrary::load("extern int; oops", &why), nullptr);
  EXPECT_NE(why.find("failed with exit code 1"), std::string::npos) << why;
  EXPECT_NE(why.find("oops"), std::string::npos) << why;
}

TEST_F(CodegenCache, PassesNamesToNoShell) {
  const fs::path odd = folder_.path() / "a b; touch oops $(touch oops)";
  const Variables variables({std::pair("TESSERA_CACHE", odd)});
  EXPECT_EQ(load_answer(), 42);
  EXPECT_TRUE(fs::exists(odd));
  EXPECT_FALSE(fs::exists("oops"));
}

TEST_F(CodegenCache, CompilesOnceForThreadsThatAskTogether) {
  std::vector<std::thread> ranks;
  std::vector<int> answers(3, 0);
  for (size_t i = 0; i < answers.size(); ++i)
    ranks.emplace_back([&answers, i] { answers[i] = load_answer(); });
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(answers, std::vector<int>(3, 42));
  EXPECT_EQ(compilations(), 1);
}

TEST(CodegenHash, DiffersForDifferentContents) {
  // The reference values of FNV-1a with 128 bits.
  EXPECT_EQ(content_hash(""), "6c62272e07bb014262b821756295c58d");
  EXPECT_EQ(content_hash("a"), "d228cb696f1a8caf78912b704e4a8964");
}

}  // namespace
}  // namespace tessera::compiler
