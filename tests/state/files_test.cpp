// The parts of which checkpoints are made.
#include "base/crc32c.h"
#include "state/files/boxes.h"
#include "state/files/folders.h"
#include "state/fuzz_readers.h"
#include "support/random.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <string>

namespace tessera::testing {
namespace {

using namespace state;

TEST(Crc32c, KnownValues) {
  const std::string digits = "123456789";
  for (const auto crc : {crc32c, crc32c_by_table}) {
    EXPECT_EQ(crc(digits.data(), digits.size(), 0), 0xE3069283U);
    EXPECT_EQ(crc(std::string(32, '\0').data(), 32, 0), 0x8A9136AAU);
    EXPECT_EQ(crc(std::string(32, '\xff').data(), 32, 0), 0x62A8AB43U);
    EXPECT_EQ(crc(nullptr, 0, 0), 0U);
    EXPECT_EQ(crc(digits.data() + 4, 5, crc(digits.data(), 4, 0)), 0xE3069283U);
  }
}

TEST(Crc32c, InstructionAndTableAgreeOnBlocksOfAnyLength) {
  std::mt19937_64 random(test_seed());
  std::string bytes((9 << 20) + 12345, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  for (const size_t length : {size_t{1}, size_t{7}, size_t{8}, size_t{1000}, bytes.size() - 3}) {
    std::vector<uint32_t> blocks;
    append_block_checksums(bytes.data() + 1, length, blocks);
    ASSERT_EQ(blocks.size(), (length + kChecksumBlock - 1) / kChecksumBlock);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto begin = i * kChecksumBlock;
      EXPECT_EQ(blocks[i], crc32c_by_table(bytes.data() + 1 + begin,
                                           std::min(kChecksumBlock, length - begin)));
    }
  }
}

TEST(Boxes, RunsCopyWhatBothHave) {
  std::mt19937_64 random(test_seed());
  const auto draw = [&](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  for (int round = 0; round < 500; ++round) {
    const auto dims = static_cast<size_t>(draw(4));
    std::vector<int64_t> shape(dims);
    for (auto& size : shape) size = 1 + draw(5);
    const auto draw_box = [&] {
      Box box;
      for (const auto size : shape) {
        box.offset.push_back(draw(size));
        box.length.push_back(1 + draw(size - box.offset.back()));
      }
      return box;
    };
    const auto from = draw_box();
    const auto to = draw_box();
    // Elements hold their number in the whole.
    const auto fill = [&](const Box& box, bool with_values) {
      std::vector<int32_t> values(static_cast<size_t>(volume(box.length)), -1);
      std::vector<int64_t> index(dims, 0);
      for (auto& value : values) {
        int64_t number = 0;
        bool in_from = true;
        for (size_t dim = 0; dim < dims; ++dim) {
          const auto at = box.offset[dim] + index[dim];
          number = number * shape[dim] + at;
          in_from = in_from && at >= from.offset[dim] && at < from.offset[dim] + from.length[dim];
        }
        if (with_values && in_from) value = static_cast<int32_t>(number);
        for (size_t dim = dims; dim-- > 0;) {
          if (++index[dim] < box.length[dim]) break;
          index[dim] = 0;
        }
      }
      return values;
    };
    const auto source = fill(from, true);
    auto copied = fill(to, false);
    uint64_t last = 0;
    for (const auto& run : runs_between(from, to, 4)) {
      EXPECT_GE(run.from, last);
      last = run.from + run.bytes;
      std::memcpy(reinterpret_cast<char*>(copied.data()) + run.to,
                  reinterpret_cast<const char*>(source.data()) + run.from, run.bytes);
    }
    EXPECT_EQ(copied, fill(to, true));
  }
}

TEST(Boxes, AGridCoversEachElementOnce) {
  const std::vector<int64_t> shape = {4, 6};
  const Box a{{0, 0}, {2, 6}};
  const Box b{{2, 0}, {2, 6}};
  EXPECT_TRUE(is_grid(shape, {a, b}));
  EXPECT_TRUE(is_grid(shape, {{{0, 0}, {4, 6}}}));
  EXPECT_TRUE(is_grid({}, {{{}, {}}}));
  EXPECT_TRUE(is_grid({0, 3}, {}));
  EXPECT_FALSE(is_grid(shape, {}));
  EXPECT_FALSE(is_grid(shape, {a}));
  EXPECT_FALSE(is_grid(shape, {a, a}));
  EXPECT_FALSE(is_grid(shape, {a, b, b}));
  EXPECT_FALSE(is_grid(shape, {a, {{1, 0}, {3, 6}}}));
  EXPECT_FALSE(is_grid(shape, {a, {{2, 0}, {2, 3}}}));
  EXPECT_FALSE(is_grid({}, {}));
}

TEST(NumberedNames, EndWithANumber) {
  EXPECT_EQ(numbered("step-0012")->number, 12U);
  EXPECT_EQ(numbered("step-0012")->stem, "step-");
  EXPECT_EQ(numbered("7")->stem, "");
  EXPECT_FALSE(numbered("last"));
  EXPECT_FALSE(numbered(""));
  EXPECT_FALSE(numbered("step-99999999999999999999999"));
}

/// All 100,000 run under sanitizers by make test-fuzz.
TEST(ReaderFuzz, RefusesOrAcceptsAndNothingElse) {
  const auto result = fuzz_readers(test_seed(), 5'000);
  EXPECT_EQ(result.failure, "");
  EXPECT_GT(result.refused, 1'000U);
  EXPECT_GT(result.accepted, 50U);
}

}  // namespace
}  // namespace tessera::testing
