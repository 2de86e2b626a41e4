// Plain safetensors files.
#include <tessera/tessera.h>

#include "state/checkpoint_training.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A file of this header, with its true length before it, and so many bytes of data.
std::string file_bytes(const std::string& header, size_t data) {
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  return length + header + std::string(data, 'x');
}

class SafetensorsFile : public ::testing::Test {
 protected:
  std::string refused(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
    return message_of([&] { read_safetensors(path_); });
  }
  TemporaryFolder folder_;
  std::string path_ = (folder_.path() / "a.safetensors").string();
};

TEST_F(SafetensorsFile, GivesBackWhatWasWritten) {
  StateDict tensors = {{"b", at::randn({3, 4}).t()},
                       {"a", at::arange(5)},
                       {"none", at::empty({0, 7})},
                       {"scalar", at::scalar_tensor(3.5, at::kDouble)},
                       {"half", at::randn({3}).to(at::kHalf)},
                       {"flags", at::ones({3}, at::kBool)},
                       {"complex", at::randn({2}, at::kComplexFloat).conj()},
                       {"\"quoted\" \\ \n ünïcode \xF0\x9F\xA6\x8A", at::ones({1})}};
  write_safetensors(path_, tensors);
  const auto read = read_safetensors(path_);
  ASSERT_EQ(read.size(), tensors.size());
  for (const auto& [name, tensor] : tensors)
    expect_bitwise_equal(read[name], tensor.resolve_conj().contiguous(), name);
  write_safetensors(path_, {});
  EXPECT_TRUE(read_safetensors(path_).empty());
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), {}), 1);
}

TEST_F(SafetensorsFile, MayBeginTensorsAnywhere) {
  auto bytes = file_bytes(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
      1);
  const float value = 2.5;
  bytes.append(reinterpret_cast<const char*>(&value), 4);
  std::ofstream(path_, std::ios::binary) << bytes;
  EXPECT_EQ(read_safetensors(path_)["b"].item<float>(), 2.5);
}

TEST_F(SafetensorsFile, RefusesHeadersThatDoNotFit) {
  const auto tensor = [](const char* name, const char* dtype, const char* shape,
                         const char* offsets) {
    return "\"" + std::string(name) + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
           ",\"data_offsets\":" + offsets + "}";
  };
  const auto one = [&](const char* dtype, const char* shape, const char* offsets, size_t data) {
    return refused(file_bytes("{" + tensor("w", dtype, shape, offsets) + "}", data));
  };
  const auto two = [&](const char* first, const char* second, size_t data) {
    return refused(file_bytes(
        "{" + tensor("v", "F32", "[1]", first) + "," + tensor("w", "F32", "[1]", second) + "}",
        data));
  };
  EXPECT_THAT(one("F32", "[2]", "[0,8]", 7),
              AllOf(HasSubstr(path_), HasSubstr("'w'"), HasSubstr("truncated")));
  EXPECT_THAT(one("F32", "[2]", "[0,4]", 4),
              AllOf(HasSubstr("'w'"), HasSubstr("expected 8 bytes")));
  EXPECT_THAT(one("F32", "[2]", "[8,0]", 8), AllOf(HasSubstr("'w'"), HasSubstr("ascending")));
  EXPECT_THAT(one("F32", "[2]", "[0,8]", 9), HasSubstr("1 bytes follow"));
  EXPECT_THAT(one("F32", "[2]", "[1,9]", 9), AllOf(HasSubstr("'w'"), HasSubstr("belong to none")));
  EXPECT_THAT(one("F32", "[-2]", "[0,8]", 8), AllOf(HasSubstr("'w'"), HasSubstr("from 0")));
  EXPECT_THAT(one("F32", "[2.0]", "[0,8]", 8), HasSubstr("from 0"));
  EXPECT_THAT(one("F32", "[2]", "[0,18446744073709551615]", 8), HasSubstr("from 0"));
  EXPECT_THAT(one("F32", "[2]", "[0,8,9]", 8), HasSubstr("two data_offsets"));
  EXPECT_THAT(one("F32", "[4611686018427387904,4]", "[0,8]", 8), HasSubstr("overflow"));
  EXPECT_THAT(one("F32", "[0,4611686018427387904,4]", "[0,0]", 0), HasSubstr("overflow"));
  EXPECT_THAT(one("F32", "\"2\"", "[0,8]", 8), HasSubstr("expected a list"));
  EXPECT_THAT(one("F99", "[2]", "[0,8]", 8), HasSubstr("'F99'"));
  std::string ones = "[1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  EXPECT_THAT(one("F32", (ones + "]").c_str(), "[0,4]", 4), HasSubstr("64 dimensions"));
  EXPECT_THAT(two("[0,4]", "[2,6]", 6),
              AllOf(HasSubstr("'w'"), HasSubstr("within the one before")));
  EXPECT_THAT(two("[0,4]", "[0,4]", 4), HasSubstr("within the one before"));
  EXPECT_THAT(two("[0,4]", "[8,12]", 12), HasSubstr("4 bytes before tensor 'w'"));
  EXPECT_THAT(refused(file_bytes(R"({"w":{"dtype":"F32","shape":[1]}})", 4)), HasSubstr("'w'"));
  EXPECT_THAT(refused(file_bytes(R"({"w":3})", 4)), HasSubstr("'w'"));
  EXPECT_THAT(refused(file_bytes(R"({"w":3,"w":4})", 4)), HasSubstr("the key 'w' twice"));
  EXPECT_THAT(refused(file_bytes(R"({"__metadata__":{"a":1}})", 0)), HasSubstr("__metadata__"));
}

TEST_F(SafetensorsFile, RefusesWhatIsNone) {
  EXPECT_THAT(refused(""), AllOf(HasSubstr("read_safetensors: "), HasSubstr("0 bytes")));
  EXPECT_THAT(refused("abc"), HasSubstr("truncated"));
  EXPECT_THAT(refused(std::string(8, '\xff')), HasSubstr("header of at most 0 bytes"));
  EXPECT_THAT(refused(std::string("\1\0\0\0\0\0\0\0", 8)), HasSubstr("a length of 1"));
  EXPECT_THAT(refused(std::string("\0\0\0\0\0\1\0\0{}", 10)),
              HasSubstr("header of at most 2 bytes"));
  EXPECT_THAT(refused(file_bytes("", 0)), HasSubstr("JSON object"));
  EXPECT_THAT(refused(file_bytes("[]", 0)), HasSubstr("JSON object"));
  EXPECT_THAT(refused(file_bytes("{", 0)), HasSubstr("mistake"));
  EXPECT_THAT(refused(file_bytes("{\"\xff\":1}", 0)), HasSubstr("mistake"));
  EXPECT_THAT(refused(file_bytes(R"({"a":)" + std::string(1'000'000, '['), 0)),
              HasSubstr("nested"));
  EXPECT_THAT(message_of([&] { read_safetensors(folder_.path().string()); }), HasSubstr("folder"));
  EXPECT_THAT(message_of([&] { read_safetensors(path_ + "x"); }), HasSubstr("No such file"));
}

TEST(SafetensorsOnThreads, AModelInAnyLayoutExportsAndImportsThePlainOne) {
  const TemporaryFolder folder;
  const auto plain = make_checkpoint_net(Layout::Plain);
  for (const auto layout : {Layout::Plain, Layout::Replicate, Layout::FullyShard, Layout::Tp,
                            Layout::TpPacked, Layout::TpReplicate, Layout::TpFullyShard}) {
    SCOPED_TRACE(name_of(layout));
    const auto file = (folder.path() / name_of(layout)).string();
    run_threads(2, [&] {
      auto net = make_checkpoint_net(layout);
      export_safetensors(file, net);
      auto again = make_checkpoint_net(layout, /*seed=*/2);
      EXPECT_TRUE(import_safetensors(file, again).empty());
      const auto optimizer = make_adamw(net);
      const auto expected = wholes_of(net, optimizer, packed_ranks_of(layout));
      const auto other = make_adamw(again);
      for (const auto& [name, whole] : wholes_of(again, other, packed_ranks_of(layout)))
        expect_bitwise_equal(whole, expected.at(name), name);
    });
    const auto read = read_safetensors(file);
    const auto expected = state_dict(plain);
    ASSERT_EQ(read.size(), expected.size());
    for (const auto& [name, tensor] : expected) expect_bitwise_equal(read[name], tensor, name);
  }
}

TEST(Safetensors, ImportConvertsAndReports) {
  const TemporaryFolder folder;
  const auto file = (folder.path() / "a").string();
  write_safetensors(file, {{"weight", at::full({3, 3}, 2.0, at::kDouble)},
                           {"bias", at::ones({4})},
                           {"other", at::ones({1})}});
  torch::nn::Linear net(3, 3);
  const auto before = net->weight.detach().clone();
  EXPECT_THAT(message_of([&] { import_safetensors(file, net); }),
              AllOf(HasSubstr("import_safetensors: " + file), HasSubstr("unexpected: 'other'"),
                    HasSubstr("bias (expected [3], got [4])")));
  expect_bitwise_equal(net->weight.detach(), before);
  const auto report = import_safetensors(file, net, {.strict = false});
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"other"});
  ASSERT_EQ(report.mismatched.size(), 1U);
  expect_bitwise_equal(net->weight.detach(), at::full({3, 3}, 2.0F));
}

}  // namespace
}  // namespace tessera::testing
