#include <tessera/data.h>

#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "tokenizer_json.h"

#include <gtest/gtest.h>

#include <thread>

namespace tessera::data {
namespace {

using tessera::testing::TemporaryFolder;
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

TEST_F(CorpusTest, IsToldApartByNamesSizesAndTokenizer) {
  write("one/a", "abc");
  write("two/a", "xyz");
  write("three/b", "abc");
  write("four/a", "abcd");
  const auto fingerprint = [&](const char* name) { return Corpus({path(name)}).fingerprint(); };
  EXPECT_EQ(fingerprint("one"), fingerprint("two"));
  EXPECT_NE(fingerprint("one"), fingerprint("three"));
  EXPECT_NE(fingerprint("one"), fingerprint("four"));
  EXPECT_NE(fingerprint("one"), Corpus({path("one")}, bpe(), cache()).fingerprint());
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
