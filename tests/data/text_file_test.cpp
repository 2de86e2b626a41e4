#include "corpus/text_file.h"

#include "support/message_of.h"
#include "support/temporary_folder.h"
#include "tokenizer_json.h"

#include <gtest/gtest.h>

#include <thread>

namespace tessera::data {
namespace {

using tessera::testing::message_of;
using tessera::testing::TemporaryFolder;
using testing::write_text;
using Access = TextFile::Access;

class TextFiles : public ::testing::TestWithParam<Access> {
 protected:
  std::string write(std::string_view text) const {
    write_text(folder_.path() / "text", text);
    return (folder_.path() / "text").string();
  }
  static std::string read(const TextFile& file, int64_t first, int64_t count) {
    std::string text(static_cast<size_t>(count), '?');
    file.read(first, count, text.data(), "test");
    return text;
  }

  static ContentHash::Value hash_of(std::string_view text) {
    ContentHash hash;
    hash.add(text);
    return hash.value();
  }

  const TemporaryFolder folder_;
};

TEST_P(TextFiles, GiveAnyPart) {
  const TextFile file(write("hello world"), GetParam(), "test");
  EXPECT_EQ(file.size(), 11);
  EXPECT_EQ(read(file, 0, 11), "hello world");
  EXPECT_EQ(read(file, 4, 3), "o w");
  EXPECT_EQ(read(file, 11, 0), "");
}

TEST_P(TextFiles, GiveAllInPieces) {
  const std::string text(3 << 20, 'x');
  const TextFile file(write(text + "yz"), GetParam(), "test");
  std::string all;
  file.for_each_piece(5, "test", [&](std::string_view piece) { all += piece; });
  EXPECT_EQ(all, text.substr(5) + "yz");
}

TEST_P(TextFiles, CutShortAreAnErrorAndNoSignal) {
  const std::string path = write(std::string(1 << 20, 'x'));
  const TextFile file(path, GetParam(), "test");
  for (const size_t size : {1 << 19, 100, 0}) {
    std::filesystem::resize_file(path, size);
    const auto message = message_of([&] { read(file, 0, 1 << 20); });
    EXPECT_NE(message.find("test: expected '" + path + "' to stay"), std::string::npos) << message;
    EXPECT_NE(message_of([&] { read(file, (1 << 20) - 10, 10); }).find("has changed"),
              std::string::npos);
  }
}

TEST_P(TextFiles, ThatGrewAreAnError) {
  const std::string path = write("hello");
  const TextFile file(path, GetParam(), "test");
  std::filesystem::resize_file(path, 6);
  EXPECT_NE(message_of([&] { read(file, 0, 5); }).find("with 5 bytes"), std::string::npos);
}

TEST_P(TextFiles, WithOtherContentOfTheSameSizeAreAnError) {
  const std::string path = write("hello world");
  TextFile file(path, GetParam(), "test");
  file.expect_content(0, hash_of("hello world"));
  const auto before = std::filesystem::last_write_time(path);
  write("HELLO world");
  const std::string expected = "test: expected '" + path + "' to stay as it was when it was opened";
  EXPECT_TRUE(message_of([&] { read(file, 6, 5); }).starts_with(expected));
  // Also where the time was put back, by rsync -t for instance.
  std::filesystem::last_write_time(path, before);
  EXPECT_TRUE(message_of([&] { read(file, 6, 5); }).starts_with(expected));
  write("hello world");
  EXPECT_EQ(read(file, 6, 5), "world");
}

TEST_P(TextFiles, ThatWereOnlyTouchedAreTheSame) {
  const std::string text(3 << 20, 'x');
  const std::string path = write("head" + text);
  TextFile file(path, GetParam(), "test");
  file.expect_content(4, hash_of(text));
  const auto touch = [&] {
    std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now());
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  };
  for (int i = 0; i < 3; ++i) {
    touch();
    EXPECT_EQ(read(file, 0, 6), "headxx");
  }
  const TextFile without(path, GetParam(), "test");
  touch();
  EXPECT_NE(message_of([&] { read(without, 0, 6); }).find("has changed"), std::string::npos);
}

TEST_P(TextFiles, ServeThreadsWhileTheyAreTouched) {
  const std::string path = write("hello world");
  TextFile file(path, GetParam(), "test");
  file.expect_content(0, hash_of("hello world"));
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      for (int j = 0; j < 500; ++j) EXPECT_EQ(read(file, 6, 5), "world");
    });
  }
  for (int i = 0; i < 50; ++i)
    std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now());
  for (auto& reader : readers) reader.join();
}

TEST_P(TextFiles, GivenOpenNeedNoName) {
  const std::string path = write("hello world");
  TextFile file(OpenFile(path, "test"), path, GetParam(), "test");
  file.expect_content(0, hash_of("hello world"));
  std::filesystem::rename(path, folder_.path() / "elsewhere");
  write("other words");
  EXPECT_EQ(read(file, 6, 5), "world");
}

TEST_P(TextFiles, MayBeEmpty) {
  const TextFile file(write(""), GetParam(), "test");
  EXPECT_EQ(file.size(), 0);
  EXPECT_EQ(read(file, 0, 0), "");
}

INSTANTIATE_TEST_SUITE_P(Accesses, TextFiles, ::testing::Values(Access::Mapped, Access::Direct),
                         [](const auto& info) {
                           return info.param == Access::Mapped ? "Mapped" : "Direct";
                         });

TEST(MappedTextFile, StaysAsItWasWhenItsNameIsGivenToAnother) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "text";
  write_text(path, "hello");
  const TextFile file(path.string(), Access::Mapped, "test");
  write_text(folder.path() / "other", "something else");
  std::filesystem::rename(folder.path() / "other", path);
  std::string text(5, '?');
  file.read(0, 5, text.data(), "test");
  EXPECT_EQ(text, "hello");
  std::filesystem::remove(path);
  file.read(0, 5, text.data(), "test");
  EXPECT_EQ(text, "hello");
}

TEST(DirectTextFile, NoticesAnotherFileByItsName) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "text";
  write_text(path, "hello");
  const TextFile file(path.string(), Access::Direct, "test");
  write_text(folder.path() / "other", "HELLO");
  std::filesystem::rename(folder.path() / "other", path);
  std::string text(5, '?');
  EXPECT_NE(message_of([&] { file.read(0, 5, text.data(), "test"); }).find("has changed"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::data
