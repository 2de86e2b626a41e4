#include "corpus/corpus_cache.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "tokenizer_json.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <numeric>

namespace tessera::data {
namespace {

using tessera::testing::TemporaryFolder;
using Tokens = std::vector<int64_t>;

constexpr TokenFileKind kNarrow{.key = {1, 2}, .width = 2};
constexpr TokenFileKind kWide{.key = {3, 4}, .width = 4};

std::vector<uint32_t> some_tokens(const TokenFileKind& kind) {
  std::vector<uint32_t> tokens(10000);
  std::iota(tokens.begin(), tokens.end(), kind.width == 2 ? 0U : 100000U);
  return tokens;
}

Tokens all_of(const TokenFile& file) {
  Tokens tokens(static_cast<size_t>(file.tokens()));
  file.read(0, file.tokens(), tokens.data(), "test");
  return tokens;
}

PrivateFolder open(const std::filesystem::path& folder) {
  std::string why;
  auto opened = PrivateFolder::open(folder.string(), why);
  EXPECT_TRUE(opened) << why;
  return std::move(opened.value());
}

/// The tokens in the folder, and how often they were made for this call.
std::pair<Tokens, int> ask(const std::filesystem::path& folder, const TokenFileKind& kind) {
  int made = 0;
  const TokenFile file = cached_tokens(open(folder), kind, [&](const TakeTokens& take) {
    ++made;
    const auto tokens = some_tokens(kind);
    const c10::ArrayRef all(tokens);
    take(all.slice(0, 3000));
    take({});
    take(all.slice(3000));
  });
  return {all_of(file), made};
}

Tokens expected(const TokenFileKind& kind) {
  const auto tokens = some_tokens(kind);
  return {tokens.begin(), tokens.end()};
}

std::filesystem::path only_file(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry);
  EXPECT_EQ(files.size(), 1U);
  return files.empty() ? folder : files.front();
}

TEST(TokenCache, MakesTokensOnce) {
  const TemporaryFolder folder;
  for (const auto& kind : {kNarrow, kWide}) {
    EXPECT_EQ(ask(folder.path() / "a" / "b", kind), std::pair(expected(kind), 1));
    EXPECT_EQ(ask(folder.path() / "a" / "b", kind), std::pair(expected(kind), 0));
  }
}

TEST(TokenCache, MakesBrokenFilesAnew) {
  const TemporaryFolder folder;
  ask(folder.path(), kNarrow);
  const auto file = only_file(folder.path());
  const auto size = std::filesystem::file_size(file);
  for (const size_t shorter : {size - 1, size - 2, size_t{64}, size_t{10}, size_t{0}}) {
    std::filesystem::resize_file(file, shorter);
    EXPECT_EQ(ask(folder.path(), kNarrow), std::pair(expected(kNarrow), 1)) << shorter;
  }
  for (const size_t place : {size_t{0}, size_t{17}, size_t{33}, size_t{41}, size_t{50}, size_t{64},
                             size_t{5001}, size - 1}) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(place));
    const auto byte = static_cast<char>(stream.get() ^ 4);
    stream.seekp(static_cast<std::streamoff>(place));
    stream.put(byte);
    stream.close();
    EXPECT_EQ(ask(folder.path(), kNarrow), std::pair(expected(kNarrow), 1)) << place;
  }
  EXPECT_EQ(ask(folder.path(), kNarrow).second, 0);
}

TEST(TokenCache, KeepsNothingOfAFailedMaking) {
  const TemporaryFolder folder;
  const auto fail = [](const TakeTokens& take) {
    take({1, 2, 3});
    throw std::runtime_error("no more");
  };
  EXPECT_THROW(cached_tokens(open(folder.path()), kNarrow, fail), std::runtime_error);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_EQ(ask(folder.path(), kNarrow), std::pair(expected(kNarrow), 1));
}

TEST(TokenCache, OutlivesADeadMaker) {
  const TemporaryFolder folder;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    cached_tokens(open(folder.path()), kNarrow, [](const TakeTokens& take) {
      take(std::vector<uint32_t>(50000));
      std::raise(SIGKILL);
    });
    std::_Exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(ask(folder.path(), kNarrow), std::pair(expected(kNarrow), 1));
  EXPECT_EQ(only_file(folder.path()).extension(), ".tokens");
}

TEST(TokenCacheRanks, OneMakesThemForAll) {
  const TemporaryFolder folder;  // each rank has its own; rank 0's is used
  tessera::testing::run_ranks(tessera::testing::RankKind::Processes, 4, [&] {
    const std::filesystem::path shared = broadcast_bytes(folder.path().string());
    for (uint64_t round = 0; round < 10; ++round) {
      const TokenFileKind kind{.key = {round, 9}, .width = 4};
      barrier();
      const auto [tokens, made] = ask(shared / "tokens", kind);
      EXPECT_EQ(tokens, expected(kind));
      int makers = 0;
      for (const auto& bytes : gather_bytes(std::to_string(made))) makers += std::stoi(bytes);
      EXPECT_EQ(makers, 1);
    }
    for (const auto& entry : std::filesystem::directory_iterator(shared / "tokens"))
      EXPECT_EQ(entry.path().extension(), ".tokens");
    barrier();
  });
}

TEST(TokenCache, WritesThroughNoLink) {
  const TemporaryFolder folder;
  const auto victim = folder.path() / "victim";
  const auto cache = folder.path() / "cache";
  std::filesystem::create_directory(cache);
  std::filesystem::permissions(cache, std::filesystem::perms::owner_all);
  const std::string key = ContentHash::text_of(kNarrow.key);
  for (const char* ending : {".partial", ".tokens"}) {
    testing::write_text(victim, "precious");
    std::filesystem::create_symlink(victim, cache / (key + ending));
    EXPECT_EQ(ask(cache, kNarrow), std::pair(expected(kNarrow), 1)) << ending;
    EXPECT_EQ(std::filesystem::file_size(victim), 8U) << ending;
    EXPECT_FALSE(std::filesystem::is_symlink(only_file(cache)));
    std::filesystem::remove(only_file(cache));
  }
}

TEST(TokenCache, MakesTokensOfOthersAnew) {
  const TemporaryFolder folder;
  ask(folder.path(), kNarrow);
  std::filesystem::permissions(only_file(folder.path()), std::filesystem::perms::others_write,
                               std::filesystem::perm_options::add);
  EXPECT_EQ(ask(folder.path(), kNarrow), std::pair(expected(kNarrow), 1));
  if (geteuid() != 0) return;
  ASSERT_EQ(chown(only_file(folder.path()).c_str(), 12345, 12345), 0);
  EXPECT_EQ(ask(folder.path(), kNarrow), std::pair(expected(kNarrow), 1));
}

}  // namespace
}  // namespace tessera::data
