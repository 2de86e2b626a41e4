#include "base/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace tessera {
namespace {

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

/// tables[k][b]: the effect of byte b when k bytes follow it.
constexpr CrcTables make_crc_tables(uint32_t polynomial) {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? polynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr CrcTables kCastagnoli = make_crc_tables(0x82F63B78U);
constexpr CrcTables kZip = make_crc_tables(0xEDB88320U);

uint64_t load_word(const uint8_t* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

uint32_t crc_by_table(const CrcTables& tables, const void* bytes, size_t count, uint32_t before) {
  const auto* next = static_cast<const uint8_t*>(bytes);
  uint32_t crc = ~before;
  for (; count >= 8; next += 8, count -= 8) {
    const uint64_t word = load_word(next) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= tables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; count > 0; ++next, --count) crc = (crc >> 8) ^ tables[0][(crc ^ *next) & 0xFF];
  return ~crc;
}

#if defined(__x86_64__)

bool has_crc_instruction() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}

__attribute__((target("sse4.2"))) uint32_t crc_by_instruction(const uint8_t* bytes, size_t count,
                                                              uint32_t before) {
  uint64_t crc = ~before;
  for (; count >= 8; bytes += 8, count -= 8) crc = __builtin_ia32_crc32di(crc, load_word(bytes));
  auto rest = static_cast<uint32_t>(crc);
  for (; count > 0; ++bytes, --count) rest = __builtin_ia32_crc32qi(rest, *bytes);
  return ~rest;
}

/// Four whole blocks at once: the instruction takes three cycles, and one can begin in each.
__attribute__((target("sse4.2"))) void crc_of_four_blocks(const uint8_t* bytes, uint32_t* crcs) {
  uint64_t a = ~0U;
  uint64_t b = ~0U;
  uint64_t c = ~0U;
  uint64_t d = ~0U;
  for (const uint8_t* end = bytes + kChecksumBlock; bytes < end; bytes += 8) {
    a = __builtin_ia32_crc32di(a, load_word(bytes));
    b = __builtin_ia32_crc32di(b, load_word(bytes + kChecksumBlock));
    c = __builtin_ia32_crc32di(c, load_word(bytes + 2 * kChecksumBlock));
    d = __builtin_ia32_crc32di(d, load_word(bytes + 3 * kChecksumBlock));
  }
  crcs[0] = ~static_cast<uint32_t>(a);
  crcs[1] = ~static_cast<uint32_t>(b);
  crcs[2] = ~static_cast<uint32_t>(c);
  crcs[3] = ~static_cast<uint32_t>(d);
}

#else

bool has_crc_instruction() { return false; }
uint32_t crc_by_instruction(const uint8_t* bytes, size_t count, uint32_t before) {
  return crc32c_by_table(bytes, count, before);
}
void crc_of_four_blocks(const uint8_t* bytes, uint32_t* crcs) {
  for (int i = 0; i < 4; ++i) crcs[i] = crc32c_by_table(bytes + i * kChecksumBlock, kChecksumBlock);
}

#endif

}  // namespace

uint32_t crc32c_by_table(const void* bytes, size_t count, uint32_t before) {
  return crc_by_table(kCastagnoli, bytes, count, before);
}

uint32_t crc32_of_zip(const void* bytes, size_t count, uint32_t before) {
  return crc_by_table(kZip, bytes, count, before);
}

uint32_t crc32c(const void* bytes, size_t count, uint32_t before) {
  return has_crc_instruction()
             ? crc_by_instruction(static_cast<const uint8_t*>(bytes), count, before)
             : crc32c_by_table(bytes, count, before);
}

void append_block_checksums(const void* bytes, size_t count, std::vector<uint32_t>& checksums) {
  const auto* next = static_cast<const uint8_t*>(bytes);
  while (has_crc_instruction() && count >= 4 * kChecksumBlock) {
    checksums.resize(checksums.size() + 4);
    crc_of_four_blocks(next, &checksums[checksums.size() - 4]);
    next += 4 * kChecksumBlock;
    count -= 4 * kChecksumBlock;
  }
  while (count > 0) {
    const size_t length = std::min(count, kChecksumBlock);
    checksums.push_back(crc32c(next, length));
    next += length;
    count -= length;
  }
}

}  // namespace tessera
