#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

/// CRC-32C (Castagnoli), by the processor's instruction where it has one.
namespace tessera {

/// Of these bytes, after others whose checksum is `before`.
uint32_t crc32c(const void* bytes, size_t count, uint32_t before = 0);
/// The same without the instruction.
uint32_t crc32c_by_table(const void* bytes, size_t count, uint32_t before = 0);

/// CRC-32 as zip files have it: of another polynomial.
uint32_t crc32_of_zip(const void* bytes, size_t count, uint32_t before = 0);

/// Tensors in saved checkpoints are verified in blocks of this size, so that a part can be read
/// alone.
inline constexpr size_t kChecksumBlock = 1 << 20;

/// Appends the checksum of each block of these bytes, the last of which may be shorter.
void append_block_checksums(const void* bytes, size_t count, std::vector<uint32_t>& checksums);

}  // namespace tessera
