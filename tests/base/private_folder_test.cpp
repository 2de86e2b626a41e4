#include "base/private_folder.h"

#include "support/temporary_folder.h"
#include "support/variables.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::TemporaryFolder;
using testing::Variables;

unsigned mode_of(const fs::path& path) {
  struct stat found{};
  EXPECT_EQ(lstat(path.c_str(), &found), 0) << path;
  return found.st_mode & 07777;
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class PrivateFolders : public ::testing::Test {
 protected:
  static PrivateFolder open(const fs::path& path) {
    std::string why;
    auto folder = PrivateFolder::open(path, why);
    EXPECT_TRUE(folder) << path << ": " << why;
    return std::move(folder.value());
  }
  static std::string why_not(const fs::path& path) {
    std::string why;
    EXPECT_FALSE(PrivateFolder::open(path, why)) << path;
    return why;
  }
  void SetUp() override { std::ofstream(victim_) << "precious"; }
  void TearDown() override { EXPECT_EQ(text_of(victim_), "precious"); }

  const TemporaryFolder temporary_;
  const fs::path root_ = temporary_.path();
  const fs::path victim_ = root_ / "victim";
};

TEST_F(PrivateFolders, AreThisUsersAloneWhateverTheUmask) {
  for (const mode_t mask : {0000, 0002, 0022, 0077}) {
    const mode_t before = umask(mask);
    const fs::path above = root_ / std::to_string(mask);
    const auto folder = open(above / "tokens");
    EXPECT_TRUE(folder.replace_file("file", "x"));
    close(folder.open_file("other", O_WRONLY | O_CREAT));
    umask(before);
    EXPECT_EQ(mode_of(above), 0700U);
    EXPECT_EQ(mode_of(above / "tokens"), 0700U);
    EXPECT_EQ(mode_of(above / "tokens" / "file"), 0600U);
    EXPECT_EQ(mode_of(above / "tokens" / "other"), 0600U);
  }
}

TEST_F(PrivateFolders, MayLieInOneThatOthersWriteTo) {
  fs::create_directory(root_ / "shared");
  chmod((root_ / "shared").c_str(), 0775);
  const auto folder = open(root_ / "shared" / "own");
  EXPECT_EQ(mode_of(root_ / "shared"), 0775U);
  EXPECT_EQ(mode_of(folder.path()), 0700U);
}

TEST_F(PrivateFolders, AreNotThoseThatOthersWriteTo) {
  const fs::path folder = root_ / "folder";
  fs::create_directory(folder);
  for (const unsigned mode : {0770U, 0702U, 01777U}) {
    chmod(folder.c_str(), mode);
    EXPECT_EQ(why_not(folder), "other users may write to it");
    EXPECT_EQ(mode_of(folder), mode) << "it is left as it is";
  }
  chmod(folder.c_str(), 0755);
  open(folder);
  if (geteuid() != 0) return;
  ASSERT_EQ(chown(folder.c_str(), 12345, 12345), 0);
  EXPECT_EQ(why_not(folder), "it belongs to user 12345, not to user 0");
}

TEST_F(PrivateFolders, AreNoLinks) {
  fs::create_directory(root_ / "there");
  fs::permissions(root_ / "there", fs::perms::owner_all);
  fs::create_directory_symlink(root_ / "there", root_ / "link");
  fs::create_directory_symlink(root_ / "nowhere", root_ / "dangling");
  EXPECT_EQ(why_not(root_ / "link"), "it is a link");
  EXPECT_EQ(why_not((root_ / "link").string() + "/"), "it is a link");
  EXPECT_EQ(why_not(root_ / "dangling"), "it is a link");
  EXPECT_FALSE(fs::exists(root_ / "nowhere"));
  open(root_ / "link" / "inside");  // a user may keep caches elsewhere
}

TEST_F(PrivateFolders, SayWhyTheyCantBeMade) {
  EXPECT_EQ(why_not(victim_), "it is not a folder");
  EXPECT_EQ(why_not(victim_ / "a" / "b"), "it can't be made: Not a directory");
}

TEST_F(PrivateFolders, WriteThroughNoLink) {
  const auto folder = open(root_ / "folder");
  const fs::path planted = fs::path(folder.path()) / "file";
  fs::create_symlink(victim_, planted);
  for (const int flags : {O_RDONLY, O_WRONLY | O_CREAT, O_RDWR | O_CREAT | O_TRUNC}) {
    EXPECT_EQ(folder.open_file("file", flags), -1);
    EXPECT_EQ(errno, ELOOP);
  }
  EXPECT_EQ(folder.read_file("file", 100), std::nullopt);
  EXPECT_TRUE(folder.replace_file("file", "own"));
  EXPECT_FALSE(fs::is_symlink(planted));
  EXPECT_EQ(folder.read_file("file", 100), "own");
}

TEST_F(PrivateFolders, UseNoFilesOfOthers) {
  const auto folder = open(root_ / "folder");
  const fs::path file = fs::path(folder.path()) / "file";
  EXPECT_TRUE(folder.replace_file("file", "x"));
  chmod(file.c_str(), 0660);
  EXPECT_EQ(folder.open_file("file", O_RDONLY), -1);
  EXPECT_EQ(errno, EPERM);
  ASSERT_EQ(mkfifo((file.string() + "-pipe").c_str(), 0600), 0);
  EXPECT_EQ(folder.open_file("file-pipe", O_RDONLY), -1);
  if (geteuid() != 0) return;
  chmod(file.c_str(), 0600);
  ASSERT_EQ(chown(file.c_str(), 12345, 12345), 0);
  EXPECT_EQ(folder.open_file("file", O_RDWR | O_CREAT), -1);
  EXPECT_EQ(errno, EPERM);
}

TEST_F(PrivateFolders, StayThemselvesWhenTheirNameIsGivenToAnother) {
  const auto folder = open(root_ / "folder");
  fs::rename(root_ / "folder", root_ / "moved");
  fs::create_directory(root_ / "folder");
  EXPECT_TRUE(folder.replace_file("file", "x"));
  EXPECT_TRUE(fs::is_empty(root_ / "folder"));
  EXPECT_EQ(text_of(root_ / "moved" / "file"), "x");
}

TEST_F(PrivateFolders, GiveFilesUpToASize) {
  const auto folder = open(root_ / "folder");
  EXPECT_TRUE(folder.replace_file("file", "abc"));
  EXPECT_EQ(folder.read_file("file", 3), "abc");
  EXPECT_EQ(folder.read_file("file", 2), std::nullopt);
  EXPECT_EQ(folder.read_file("none", 3), std::nullopt);
  folder.remove_file("file");
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST_F(PrivateFolders, GoAwayIfTheyAreTemporary) {
  const Variables variables({std::pair("TMPDIR", root_.string())});
  std::string why, path;
  {
    const auto folder = PrivateFolder::make_temporary(why);
    ASSERT_TRUE(folder) << why;
    path = folder->path();
    EXPECT_EQ(fs::path(path).parent_path(), root_);
    EXPECT_TRUE(folder->replace_file("file", "x"));
  }
  EXPECT_FALSE(fs::exists(path));
  const Variables nowhere({std::pair("TMPDIR", "/dev/null")});
  EXPECT_FALSE(PrivateFolder::make_temporary(why));
  EXPECT_EQ(why, "no folder like /dev/null/tessera-XXXXXX can be made: Not a directory");
}

TEST(CachePath, IsInTheUsersCacheOrNamedByTheUser) {
  const auto path = [](std::map<std::string, std::string> variables) {
    return cache_path("tokens", Environment(std::move(variables)));
  };
  EXPECT_EQ(path({{"XDG_CACHE_HOME", "/x/"}, {"HOME", "/h"}}), "/x/tessera/tokens");
  EXPECT_EQ(path({{"HOME", "/h"}, {"TMPDIR", "/t"}}), "/h/.cache/tessera/tokens");
  const auto name = "/tessera-" + std::to_string(geteuid()) + "-tokens";
  EXPECT_EQ(path({{"TMPDIR", "/t"}}), "/t" + name);
  EXPECT_EQ(path({}), "/tmp" + name);
}

}  // namespace
}  // namespace tessera
