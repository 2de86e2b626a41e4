#include <tessera/corpus.h>

#include "corpus/corpus_cache.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/variables.h"
#include "tokenizer_json.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace tessera::data {
namespace {

namespace fs = std::filesystem;
using tessera::testing::TemporaryFolder;
using tessera::testing::Variables;
using testing::TokenizerJson;
using testing::write_text;

std::string text_of(const Corpus& corpus) {
  const at::Tensor tokens = corpus.read(0, corpus.tokens());
  EXPECT_EQ(tokens.scalar_type(), at::kLong);
  return corpus.tokenizer().decode(
      {tokens.const_data_ptr<int64_t>(), static_cast<size_t>(tokens.numel())});
}

class CorpusTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, std::string_view text) const {
    write_text(folder_.path() / name, text);
    return (folder_.path() / name).string();
  }
  std::string path(const std::string& name = "") const { return (folder_.path() / name).string(); }
  /// Merges "th", "the", " the".
  Tokenizer bpe() const {
    const TokenizerJson json{.merges = {{"t", "h"}, {"th", "e"}, {"Ġ", "the"}}};
    return Tokenizer::from_file(json.write(folder_.path() / ".hidden" / "tokenizer.json"));
  }
  CorpusOptions cache() const { return {.cache = path(".cache")}; }

  const TemporaryFolder folder_;
};

TEST_F(CorpusTest, PutsTheTextsOfAFolderInOrder) {
  write("b.txt", "2");
  write("a/z.txt", "1");
  write("a.txt", "0");
  write("c/d/e.md", "3");
  const Corpus corpus({path()});
  EXPECT_EQ(text_of(corpus), "0123");
  EXPECT_EQ(corpus.files(), 4);
  EXPECT_EQ(corpus.bytes(), 4);
  EXPECT_EQ(corpus.tokens(), 4);
  EXPECT_TRUE(corpus.tokenizer().is_bytes());
}

TEST_F(CorpusTest, LeavesOutWhatIsNoText) {
  write("text", "yes");
  write(".git/config", "no");
  write(".hidden", "no");
  write("build/x.txt", "no");
  write("sub/runs/x.txt", "no");
  write("node_modules/x.js", "no");
  write("empty", "");
  write("binary", std::string_view("a\0b", 3));
  write("late_zero", std::string(64 << 10, 'x') + '\0');
  std::filesystem::create_directory_symlink(path(), path("round"));
  std::filesystem::create_symlink("nowhere", path("dangling"));
  std::filesystem::create_symlink("text", path("twin"));  // the same file: once
  const Corpus corpus({path()});
  EXPECT_EQ(corpus.files(), 2);
  EXPECT_EQ(corpus.bytes(), (64 << 10) + 1 + 3);
}

TEST_F(CorpusTest, TakesNamedFilesAsTheyAreAndAsTheyCome) {
  const std::string binary = write("binary", std::string_view("a\0b", 3));
  const std::string hidden = write(".hidden", "h");
  write("build/x", "x");
  const Corpus corpus({hidden, binary, path("build"), hidden});
  EXPECT_EQ(text_of(corpus), std::string("ha\0bx", 5));
  EXPECT_EQ(corpus.files(), 3);
}

TEST_F(CorpusTest, ReadsAcrossFiles) {
  write("a", "abc");
  write("b", "d");
  write("c", "efgh");
  const Corpus corpus({path()});
  const std::string text = "abcdefgh";
  for (int64_t first = 0; first <= 8; ++first) {
    for (int64_t count = 0; first + count <= 8; ++count) {
      const at::Tensor tokens = corpus.read(first, count);
      ASSERT_EQ(tokens.numel(), count);
      for (int64_t i = 0; i < count; ++i)
        EXPECT_EQ(tokens.const_data_ptr<int64_t>()[i], text[static_cast<size_t>(first + i)]);
    }
  }
}

TEST_F(CorpusTest, CutsWindows) {
  const Corpus corpus({write("text", "abcdefgh")});
  const at::Tensor rows = corpus.windows({2, 0, 1}, 2, 4);
  EXPECT_EQ(rows.sizes(), (std::vector<int64_t>{3, 4}));
  const int64_t* row = rows.const_data_ptr<int64_t>();
  EXPECT_EQ(Tokenizer().decode({row, 12}), "efghabcdcdef");
  EXPECT_EQ(corpus.windows({}, 2, 4).sizes(), (std::vector<int64_t>{0, 4}));
}

TEST_F(CorpusTest, HoldsBytesAbove127) {
  const Corpus corpus({write("text", "\xFF\x80")});
  EXPECT_EQ(corpus.read(0, 2).const_data_ptr<int64_t>()[0], 255);
}

TEST_F(CorpusTest, IsToldApartByNamesContentsAndTokenizer) {
  write("one/a", "abc");
  write("same/a", "abc");
  write("two/a", "abx");
  write("three/b", "abc");
  write("four/a", "abcd");
  const auto fingerprint = [&](const char* name) { return Corpus({path(name)}).fingerprint(); };
  EXPECT_EQ(fingerprint("one"), fingerprint("same"));
  EXPECT_NE(fingerprint("one"), fingerprint("two"));
  EXPECT_NE(fingerprint("one"), fingerprint("three"));
  EXPECT_NE(fingerprint("one"), fingerprint("four"));
  EXPECT_NE(fingerprint("one"), Corpus({path("one")}, bpe(), cache()).fingerprint());
}

TEST_F(CorpusTest, NamesItsFilesAndTheirContents) {
  write("one/a", "abc");
  write("one/b/c", "abc");
  write("one/d", "abd");
  for (const Corpus& corpus : {Corpus({path("one")}), Corpus({path("one")}, bpe(), cache())}) {
    const auto& contents = corpus.contents();
    ASSERT_EQ(contents.size(), 3U);
    EXPECT_EQ(contents[1].name, "b/c");
    EXPECT_EQ(contents[0].hash, contents[1].hash);
    EXPECT_NE(contents[0].hash, contents[2].hash);
  }
}

TEST_F(CorpusTest, SeesContentThatChangesWhileItIsRead) {
  const std::string file = write("one/a", "hello world");
  const Corpus corpus({file});
  write("one/a", "hello World");
  const auto message = tessera::testing::message_of([&] { corpus.windows({0}, 1, 3); });
  EXPECT_NE(message.find("Corpus::windows: expected '" + file + "' to stay"), std::string::npos);
}

/// Without a home the cache is in the temporary folder, where anybody may have been before.
class CorpusCache : public CorpusTest {
 protected:
  CorpusCache() { write("text/a", "the theme"); }
  fs::path own() const {
    return folder_.path() / ("tessera-" + std::to_string(geteuid()) + "-tokens");
  }
  std::string tokens() const { return text_of(Corpus({path("text")}, bpe())); }

  const Variables variables_{{{"XDG_CACHE_HOME", ""}, {"HOME", ""}, {"TMPDIR", folder_.path()}}};
};

TEST_F(CorpusCache, IsPrivateWithoutAHome) {
  const mode_t before = umask(0);
  EXPECT_EQ(tokens(), "the theme");
  umask(before);
  struct stat found{};
  ASSERT_EQ(stat(own().c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0700U);
  EXPECT_FALSE(fs::is_empty(own()));
}

TEST_F(CorpusCache, IsNotUsedIfItIsALinkOrOfOthers) {
  fs::create_directory(folder_.path() / "others");
  fs::create_directory_symlink(folder_.path() / "others", own());
  EXPECT_EQ(tokens(), "the theme");
  EXPECT_TRUE(fs::is_empty(folder_.path() / "others"));
  fs::remove(own());
  fs::create_directory(own());
  fs::permissions(own(), fs::perms::all);
  EXPECT_EQ(tokens(), "the theme");
  EXPECT_TRUE(fs::is_empty(own()));
  if (geteuid() == 0) {
    fs::permissions(own(), fs::perms::owner_all);
    ASSERT_EQ(chown(own().c_str(), 12345, 12345), 0);
    EXPECT_EQ(tokens(), "the theme");
    EXPECT_TRUE(fs::is_empty(own()));
  }
  for (const auto& entry : fs::directory_iterator(folder_.path()))
    EXPECT_TRUE(entry.path() == own() || !entry.path().filename().string().starts_with("tessera-"))
        << entry.path() << " was left behind";
}

TEST_F(CorpusCache, IsNotNeededWhereTheHomeCantBeWrittenTo) {
  const Variables home({std::pair("HOME", "/dev/null")});
  EXPECT_EQ(tokens(), "the theme");
  EXPECT_FALSE(fs::exists(own()));
}

class HashCacheTest : public CorpusTest {
 protected:
  /// The hash by a cache that asks an hour from now, when files have been at rest, and how many
  /// were read for it.
  std::pair<ContentHash::Value, int64_t> ask(const std::string& file, int64_t later = kHour) const {
    std::string why;
    const auto folder = PrivateFolder::open(path(".cache"), why);
    EXPECT_TRUE(folder) << why;
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    HashCache cache(&*folder, std::chrono::nanoseconds(now).count() + later);
    const auto hash = cache.hash_of(TextFile(file, TextFile::Access::Mapped, "test"));
    cache.save();
    return {hash, cache.reads()};
  }
  static ContentHash::Value hash_of(std::string_view text) {
    ContentHash hash;
    hash.add(text);
    return hash.value();
  }
  static constexpr int64_t kHour = 3'600'000'000'000;
  const std::string text_ = std::string(HashCache::kLeastBytes, 'x');
};

TEST_F(HashCacheTest, ReadsLargeFilesOnce) {
  const std::string file = write("a", text_), other = write("b", text_ + "y");
  EXPECT_EQ(ask(file), std::pair(hash_of(text_), int64_t{1}));
  EXPECT_EQ(ask(other), std::pair(hash_of(text_ + "y"), int64_t{1}));
  EXPECT_EQ(ask(file), std::pair(hash_of(text_), int64_t{0}));
  EXPECT_EQ(ask(other), std::pair(hash_of(text_ + "y"), int64_t{0}));
  const std::string small = write("c", "small");
  for (int i = 0; i < 2; ++i) EXPECT_EQ(ask(small), std::pair(hash_of("small"), int64_t{1}));
}

TEST_F(HashCacheTest, ReadsFilesAgainThatWereWrittenTo) {
  const std::string file = write("a", text_);
  ask(file);
  const auto before = fs::last_write_time(file);
  const std::string changed = "y" + text_.substr(1);
  write("a", changed);
  fs::last_write_time(file, before);
  EXPECT_EQ(ask(file), std::pair(hash_of(changed), int64_t{1}));
  write("new", text_);
  fs::rename(path("new"), file);
  EXPECT_EQ(ask(file), std::pair(hash_of(text_), int64_t{1}));
}

TEST_F(HashCacheTest, KeepsNoHashOfAFileThatWasWrittenJustNow) {
  const std::string file = write("a", text_);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(ask(file, 0), std::pair(hash_of(text_), int64_t{1}));
}

TEST_F(HashCacheTest, IsNotMisledByABrokenTable) {
  const std::string file = write("a", text_);
  ask(file);
  const auto table = folder_.path() / ".cache" / "hashes";
  const auto size = fs::file_size(table);
  for (const size_t place : {size_t{3}, size_t{20}, size_t{60}, size - 1}) {
    std::fstream stream(table, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(place));
    const auto byte = static_cast<char>(stream.get() ^ 4);
    stream.seekp(static_cast<std::streamoff>(place));
    stream.put(byte);
    stream.close();
    EXPECT_EQ(ask(file), std::pair(hash_of(text_), int64_t{1})) << place;
  }
  for (const size_t shorter : {size - 1, size_t{40}, size_t{0}}) {
    fs::resize_file(table, shorter);
    EXPECT_EQ(ask(file), std::pair(hash_of(text_), int64_t{1})) << shorter;
  }
}

TEST_F(CorpusTest, MakesTokensOfEachFileByItself) {
  write("a", "the th");
  write("b", "e the");
  const Corpus corpus({path("a"), path("b")}, bpe(), cache());
  EXPECT_EQ(corpus.tokens(), 5);  // "the", " ", "th"; "e", " the"
  EXPECT_EQ(text_of(corpus), "the the the");
  EXPECT_EQ(corpus.bytes(), 11);
  EXPECT_EQ(corpus.files(), 2);
}

TEST_F(CorpusTest, MakesTheSameTokensOfLargeFilesInPieces) {
  std::string text;
  while (text.size() < (5 << 20)) {
    text += "the theme of " + std::to_string(text.size()) + " was\n\tthé end. ";
    if (text.size() % 7 == 0) text += std::string(300000, 't');
  }
  const Tokenizer tokenizer = bpe();
  const Corpus corpus({write("text", text)}, tokenizer, cache());
  const auto whole = tokenizer.encode(text);
  ASSERT_EQ(corpus.tokens(), static_cast<int64_t>(whole.size()));
  const at::Tensor tokens = corpus.read(0, corpus.tokens());
  EXPECT_TRUE(std::equal(whole.begin(), whole.end(), tokens.const_data_ptr<int64_t>()));
}

TEST_F(CorpusTest, FindsTokensAgainByContents) {
  const auto cached = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path(".cache")))
      names.push_back(entry.path().filename().string());
    return names.size();
  };
  const std::string file = write("a", "the one");
  Corpus({file}, bpe(), cache());
  Corpus({write("elsewhere/a", "the one")}, bpe(), cache());
  EXPECT_EQ(cached(), 1U);
  const Corpus changed({write("a", "the two")}, bpe(), cache());
  EXPECT_EQ(text_of(changed), "the two");
  EXPECT_EQ(cached(), 2U);
}

TEST_F(CorpusTest, KeepsItsTokensWhenTheCacheIsRemoved) {
  const Corpus corpus({write("a", "the one")}, bpe(), cache());
  std::filesystem::remove_all(path(".cache"));
  std::filesystem::remove(path("a"));
  EXPECT_EQ(text_of(corpus), "the one");
}

TEST_F(CorpusTest, ServesSeveralThreads) {
  write("a", std::string(10000, 'a'));
  write("b", std::string(10000, 'b'));
  const Corpus corpus({path()});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([copy = corpus] {
      for (int64_t i = 0; i < 200; ++i) {
        const at::Tensor row = copy.read(9900, 200);
        EXPECT_EQ(row.const_data_ptr<int64_t>()[99], 'a');
        EXPECT_EQ(row.const_data_ptr<int64_t>()[100], 'b');
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace tessera::data
