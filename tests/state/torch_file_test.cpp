// Files of torch.save that somebody made: refused by a ValueError, in little time and memory.
#include <tessera/tessera.h>

#include "state/torch_bytes.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using namespace std::string_literals;

class TorchFileErrors : public ::testing::Test {
 protected:
  std::string write(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
    return path_;
  }
  std::string refused(const std::string& bytes) {
    write(bytes);
    return message_of<c10::ValueError>([&] { read_torch(path_, {.key = "model"}); });
  }
  std::string refused_pickle(const std::string& pickle) { return refused(torch_file_of(pickle)); }
  /// The sample with one text of its pickle exchanged.
  std::string refused_with(const std::string& from, const std::string& to) {
    auto pickle = some_pickle();
    const auto place = pickle.find(from);
    EXPECT_NE(place, std::string::npos);
    return refused_pickle(pickle.replace(place, from.size(), to));
  }

  TemporaryFolder folder_;
  std::string path_ = (folder_.path() / "a.pt").string();
};

TEST_F(TorchFileErrors, TheSampleItselfIsRead) {
  write(torch_file_of(some_pickle()));
  const auto tensors = read_torch(path_, {.key = "model"});
  ASSERT_EQ(tensors.size(), 4U);
  EXPECT_EQ(tensors["w"].sizes(), (at::IntArrayRef{3, 2}));
  EXPECT_TRUE(tensors["w"].is_alias_of(tensors["v"]));
  EXPECT_TRUE(at::equal(tensors["w"].t(), tensors["v"]));
  EXPECT_EQ(tensors["f"].scalar_type(), at::kFloat8_e5m2);
  auto from_gpu = some_pickle();
  from_gpu.replace(from_gpu.find("\003\000\000\000cpu"s), 7, "\006\000\000\000cuda:0"s);
  write(torch_file_of(from_gpu));
  EXPECT_TRUE(read_torch(path_, {.key = "model"})["w"].is_cpu());
}

TEST_F(TorchFileErrors, OfTheZipFile) {
  const auto good = torch_file_of(some_pickle());
  EXPECT_THAT(refused(""), HasSubstr("a zip file, got one that begins otherwise"));
  EXPECT_THAT(refused(good.substr(0, good.size() - 30)), HasSubstr("truncated"));
  for (const size_t length : {5U, 100U, 600U, 900U})
    EXPECT_THAT(refused(good.substr(0, length)), HasSubstr("a.pt: expected"));
  auto flipped = good;
  flipped[good.find(std::string(24, 'w'))] = 'x';
  EXPECT_THAT(refused(flipped), HasSubstr("expected the bytes of 'archive/data/0' to have the "
                                          "checksum of the directory, got another"));
  auto packed = good;
  packed[packed.rfind("PK\x01\x02") + 10] = 8;
  EXPECT_THAT(refused(packed), HasSubstr("neither encrypted nor compressed"));
  for (const std::string name : {"../data.pkl", "/data.pkl", "a/../../data.pkl", "a\\data.pkl"})
    EXPECT_THAT(refused(zip_of({{name, some_pickle()}})), HasSubstr("expected names within"));
  EXPECT_THAT(refused(zip_of({{"a/data.pkl", "x"}, {"a/data.pkl", "x"}})),
              HasSubstr("once, got it twice"));
  EXPECT_THAT(refused(zip_of({{"a/data.pkl", "x"}, {"b/data.pkl", "x"}})), HasSubstr("several"));
  EXPECT_THAT(refused(zip_of({{"a/b", "x"}})), HasSubstr("without data.pkl"));
  EXPECT_THAT(refused(zip_of({{"a/data.pkl", some_pickle()}, {"a/byteorder", "big"}})),
              HasSubstr("byte order"));
  auto huge = good;
  huge.replace(huge.rfind("PK\x05\x06") + 12, 4, "\xff\xff\xff\xff");
  EXPECT_THAT(refused(huge), HasSubstr("expected a directory of at most"));
}

TEST_F(TorchFileErrors, EntriesThatOverlap) {
  // One inside of another: the outer one's bytes are a header and the bytes of the inner.
  const auto inner = zip_of({{"a/in", "12345678"}}).substr(0, 30 + 4 + 8);
  auto file = zip_of({{"a/out", inner}, {"a/in", "12345678"}});
  const auto directory = file.rfind("PK\x01\x02");
  std::string place;
  put(place, file.find(inner), 4);
  file.replace(directory + 42, 4, place);
  EXPECT_THAT(refused(file), HasSubstr("expected entries apart from each other, but 'a/in' begins "
                                       "within 'a/out'"));
}

TEST_F(TorchFileErrors, OfThePickle) {
  EXPECT_THAT(refused_with("ccollections\nOrderedDict\n", "cos\nsystem\n"),
              HasSubstr("numbers alone, got 'os.system'; save model.state_dict() alone"));
  EXPECT_THAT(refused_with("torch\nFloatStorage", "builtins\neval"), HasSubstr("'builtins.eval'"));
  EXPECT_THAT(refused_pickle(""), HasSubstr("expected more of it"));
  EXPECT_THAT(refused_pickle("\x80\x02."s), HasSubstr("expected one value"));
  EXPECT_THAT(refused_pickle("\x80\x02X\xff\xff\xff\xffw."s),
              HasSubstr("string of 4294967295 bytes"));
  EXPECT_THAT(refused_pickle("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fw."s),
              HasSubstr("within"));
  EXPECT_THAT(refused_pickle("\x80\x02]h\x05"
                             "a."s),
              HasSubstr("that was remembered"));
  EXPECT_THAT(refused_pickle("\x80\x02t."s), HasSubstr("expected a mark"));
  EXPECT_THAT(refused_pickle("\x80\x02}(K\x01u."s), HasSubstr("keys with values"));
  EXPECT_THAT(refused_pickle("\x80\x02(K\x01(\x86."s), HasSubstr("a value on its stack"));
  EXPECT_THAT(refused_pickle("\x80\x02ic\n."s), HasSubstr("opcode 0x69"));
  EXPECT_THAT(refused_pickle("\x80\x02\x8a\x64" + std::string(100, 'x')), HasSubstr("64 bits"));
}

TEST_F(TorchFileErrors, BombsAndCycles) {
  // Each tuple holds the one before it twice; the last one is of 2^200 elements.
  auto laughs = "\x80\x02(]q\x01"s;
  for (int i = 0; i < 200; ++i) laughs += "h\x01h\x01\x86q\x01"s;
  EXPECT_THAT(refused_pickle(laughs + "t."), HasSubstr("got a tuple"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { read_torch_index(path_); }), HasSubstr("deep"));
  const auto nested = "\x80\x02K\x01" + std::string(1'000'000, '\x85') + ".";
  EXPECT_THAT(refused_pickle(nested), HasSubstr("got a tuple"));
  EXPECT_THAT(refused_pickle("\x80\x02" + std::string(2'100'000, ']') + "."), HasSubstr("at most"));
  // A dict that is its own "model".
  EXPECT_THAT(refused_pickle("\x80\x02}q\x01X\x05\0\0\0modelh\x01s."s),
              HasSubstr("expected tensors by name alone"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { read_torch_index(path_); }), HasSubstr("deep"));
}

TEST_F(TorchFileErrors, NamesThatTakeMoreMemoryThanTheFile) {
  const std::string name(5000, 'w');
  EXPECT_THAT(refused_with("X\001\000\000\000wq\004"s, "X\x88\x13\0\0"s + name + "q\004"),
              HasSubstr("names of at most 4096 bytes, got one of 5000"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { read_torch_index(path_); }),
              HasSubstr("names of at most 4096 bytes"));
  EXPECT_THAT(refused_with("X\001\000\000\000vq\020"s, "h\004q\020"s),
              HasSubstr("'w' once in the dict, got it twice"));
}

TEST_F(TorchFileErrors, OfTensors) {
  EXPECT_THAT(refused_with("K\003K\002\206q\013", "K\003K\003\206q\013"),
              HasSubstr("expected tensor 'w' within its storage by sizes, strides and offset"));
  EXPECT_THAT(refused_with("QK\000K\003"s, "QK\001K\003"s), HasSubstr("within its storage"));
  EXPECT_THAT(refused_with("QK\000K\003"s, "QJ\xff\xff\xff\xffK\003"s),
              HasSubstr("expected the offset of tensor 'w', got an int of -1"));
  EXPECT_THAT(refused_with("K\003K\002\206q\013",
                           "\x8a\x08"
                           "\0\0\0\0\0\0\0\x40K\x20\206q\013"s),
              HasSubstr("overflow"));
  EXPECT_THAT(refused_with("K\006tq\012", "K\007tq\012"), HasSubstr("expected 7 elements"));
  EXPECT_THAT(refused_with("X\001\000\000\0000q\010"s, "X\001\000\000\0009q\010"s),
              HasSubstr("'archive/data/9', got none of this name"));
  EXPECT_THAT(refused_with("FloatStorage", "DoubleStorage"), HasSubstr("expected 6 elements"));
  EXPECT_THAT(refused_with("float8_e5m2", "float32"), HasSubstr("tensor 'f' within its storage"));
  EXPECT_THAT(refused_with("X\001\000\000\000vq"s, "X\001\000\000\000wq"s),
              HasSubstr("expected 'w' once in the dict, got it twice"));
}

}  // namespace
}  // namespace tessera::testing
