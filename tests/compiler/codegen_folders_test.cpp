// What goes wrong around the cache: folders that can't be written to, compilers that make something
// else, processes that were killed.
#include <tessera/compile.h>

#include "cached_answers.h"
#include "compiler/kernels/host_library.h"
#include "compiler/kernels/kernel_cache.h"
#include "support/subprocess.h"

#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace tessera::compiler {
namespace {

class CodegenFolders : public CodegenCache {
 protected:
  /// A compiler that ignores its source.
  std::string empty_compiler() const {
    return script("empty",
                  "for each; do if [ \"$last\" = -o ]; then to=$each; fi; last=$each; done\n"
                  "echo 'int x;' | /usr/bin/env c++ -shared -fPIC -x c++ - -o \"$to\"\n");
  }

  static std::string why_not_loaded() {
    std::string why;
    EXPECT_EQ(HostLibrary::load(source_of(42), &why), nullptr);
    return why;
  }

  /// Runs the disabled test of that name in a process of its own; what it wrote.
  std::string output_of(const std::string& name) const {
    testing::Subprocess child({.arguments = {fs::read_symlink("/proc/self/exe"),
                                             "--gtest_filter=CodegenFolders.DISABLED_" + name,
                                             "--gtest_also_run_disabled_tests"},
                               .output = folder_.path() / "output"});
    const auto status = child.wait(std::chrono::seconds(60));
    EXPECT_TRUE(status && status->ok()) << child.output();
    return child.output();
  }
};

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST_F(CodegenFolders, RebuildAnEntryWithoutAProgram) {
  EXPECT_EQ(load_answer(), 42);
  const std::string library = only_library();
  const std::string other = folder_.path() / "other.cpp";
  std::ofstream(other) << "int x;\n";
  std::string why;
  ASSERT_TRUE(Toolchain::find(&why)->compile(other, library, &why)) << why;
  ASSERT_TRUE(cache_entry::seal(library));
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(compilations(), 3);
}

TEST_F(CodegenFolders, SayThatACompilerMadeNoProgram) {
  const Variables variables({std::pair("CXX", empty_compiler())});
  const auto why = why_not_loaded();
  EXPECT_NE(why.find("has no tessera_host_interface in it"), std::string::npos) << why;
  // The program itself runs without.
  const auto run = codegen(Graph::parse(R"(input %0: float32[4] = argument "x"
%1: float32[4] = aten::neg(%0)
%2: float32[4] = aten::exp(%1)
return %2
)"));
  const auto x = at::randn({4});
  EXPECT_TRUE(at::equal(run.run({x}).at(0), x.neg().exp()));
}

TEST_F(CodegenFolders, RefuseProgramsOfAnotherInterface) {
  std::string why;
  EXPECT_EQ(HostLibrary::load(source_of(42, kHostInterface + 1), &why), nullptr);
  EXPECT_NE(why.find("has interface"), std::string::npos) << why;
}

TEST_F(CodegenFolders, SayThatACompilerMadeNothing) {
  const Variables variables({std::pair("CXX", "/bin/true")});
  const auto why = why_not_loaded();
  EXPECT_NE(why.find("/bin/true made no library, and no error: is it a C++ compiler?"),
            std::string::npos)
      << why;
}

TEST_F(CodegenFolders, KeepEntriesWhateverTheUmask) {
  const mode_t before = umask(0002);
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(load_answer(), 42);
  umask(before);
  EXPECT_EQ(compilations(), 1);
  struct stat found{};
  ASSERT_EQ(stat(only_library().c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0700U);
}

TEST_F(CodegenFolders, AreNotTakenForOptions) {
  const auto before = fs::current_path();
  fs::current_path(folder_.path());
  for (const char* name : {"-dash", "@at"}) {
    const Variables variables({std::pair("TESSERA_CACHE", name)});
    EXPECT_EQ(load_answer(), 42);
    EXPECT_EQ(load_answer(), 42);
    EXPECT_FALSE(fs::is_empty(folder_.path() / name));
  }
  fs::current_path(before);
  EXPECT_EQ(compilations(), 2);
}

TEST_F(CodegenFolders, GiveWayToAnotherWhereTheLoaderWouldReplaceTheirPath) {
  const fs::path odd = folder_.path() / "$ORIGIN" / "cache";
  const Variables variables({std::pair("TESSERA_CACHE", odd)});
  EXPECT_EQ(load_answer(), 42);
  EXPECT_FALSE(fs::exists(odd));
}

TEST_F(CodegenFolders, GiveWayToAnotherWhereTheyCantBeWrittenTo) {
  // Permissions don't bind the superuser.
  const fs::path sealed = geteuid() == 0 ? fs::path("/sys/kernel") : folder_.path() / "sealed";
  if (geteuid() == 0 && !fs::exists(sealed)) GTEST_SKIP() << "no " << sealed;
  if (geteuid() != 0) {
    fs::create_directory(sealed);
    fs::permissions(sealed, fs::perms::owner_read | fs::perms::owner_exec);
  }
  std::string why;
  const auto folder = PrivateFolder::open(sealed, why);
  ASSERT_TRUE(folder) << why;
  why = why_unusable(*folder);
  EXPECT_TRUE(why.starts_with("it can't be written to: ")) << why;
  const Variables variables({std::pair("TESSERA_CACHE", sealed)});
  EXPECT_EQ(load_answer(), 42);
  EXPECT_EQ(compilations(), 1);
}

TEST_F(CodegenFolders, GiveWayToAnotherWhereTheyAreFull) {
  fs::create_directory(cache_);
  if (mount("tmpfs", cache_.c_str(), "tmpfs", 0, "size=8k,mode=700") != 0)
    GTEST_SKIP() << "no file system can be mounted here";
  std::string why;
  {
    const auto folder = PrivateFolder::open(cache_, why);
    ASSERT_TRUE(folder) << why;
    why = why_unusable(*folder);
  }
  const int answer = load_answer();
  umount(cache_.c_str());
  EXPECT_TRUE(why.starts_with("it has no room: ")) << why;
  EXPECT_EQ(answer, 42);
}

TEST_F(CodegenFolders, ServeWhatTheyHoldWhereTheyCantBeWrittenTo) {
  EXPECT_EQ(load_answer(), 42);
  if (geteuid() == 0) {
    if (mount(cache_.c_str(), cache_.c_str(), nullptr, MS_BIND, nullptr) != 0)
      GTEST_SKIP() << "no file system can be mounted here";
    mount(nullptr, cache_.c_str(), nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY, nullptr);
  } else {
    fs::permissions(cache_, fs::perms::owner_read | fs::perms::owner_exec);
  }
  const int answer = load_answer();
  if (geteuid() == 0) umount(cache_.c_str());
  EXPECT_EQ(answer, 42);
  EXPECT_EQ(compilations(), 1);
}

/// What the child process of the next test does.
TEST_F(CodegenFolders, DISABLED_InterpretInAChild) {
  const Variables variables({{"TESSERA_CACHE", "/dev/null/none"}, {"TMPDIR", "/dev/null"}});
  const std::string graph = R"(input %0: float32[4] = argument "x"
%1: float32[4] = aten::neg(%0)
%2: float32[4] = aten::exp(%1)
return %2
)";
  const auto x = at::randn({4});
  for (int i = 0; i < 2; ++i)
    EXPECT_TRUE(at::equal(codegen(Graph::parse(graph)).run({x}).at(0), x.neg().exp()));
}

TEST_F(CodegenFolders, AreNotNeededToInterpret) {
  const auto output = output_of("InterpretInAChild");
  EXPECT_EQ(count_of(output, "Warning: "), 1U) << output;
  const std::string warning =
      "compile: programs are interpreted, without kernels of their own: the cache folder "
      "'/dev/null/none' is not used: it can't be made: Not a directory; and no folder like "
      "/dev/null/tessera-XXXXXX can be made: Not a directory; set TESSERA_CACHE or TMPDIR";
  EXPECT_EQ(count_of(output, warning), 1U) << output;
}

TEST_F(CodegenFolders, LoseTheDraftsOfKilledCompilations) {
  fs::create_directory(cache_);
  fs::permissions(cache_, fs::perms::owner_all);
  const std::string entry = cache_ + "/" + content_hash("other");
  const auto make = [](const std::string& path, std::chrono::hours age) {
    std::ofstream(path) << "x";
    fs::last_write_time(path, fs::file_time_type::clock::now() - age);
    return path;
  };
  using std::chrono::hours;
  const std::vector<std::string> gone = {make(entry + ".17.so", hours(25)),
                                         make(entry + ".17.cpp", hours(25)),
                                         make(entry + ".17.so.log", hours(25))};
  const std::vector<std::string> kept = {
      make(entry + ".18.so", hours(23)), make(entry + ".so", hours(25)),
      make(entry + ".cpp", hours(25)), make(entry + ".lock", hours(25)),
      make(cache_ + "/a.user.file", hours(25))};
  EXPECT_EQ(load_answer(), 42);
  for (const auto& path : gone) EXPECT_FALSE(fs::exists(path)) << path;
  for (const auto& path : kept) EXPECT_TRUE(fs::exists(path)) << path;
}

}  // namespace
}  // namespace tessera::compiler
