#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::data {

/// 128 bits that tell contents apart, at several GB/s. Not against people who want them to be
/// equal. The same bytes give the same in whatever pieces they come.
class ContentHash {
 public:
  using Value = std::array<uint64_t, 2>;

  void add(std::string_view bytes);
  /// A text of its own: its length first, so that neighbours can't trade bytes.
  void add_text(std::string_view text);
  void add_number(uint64_t number);
  Value value() const;
  /// As 32 hexadecimal digits.
  std::string text() const { return text_of(value()); }
  static std::string text_of(const Value& value);

 private:
  static constexpr size_t kBlock = 64;
  void mix_block(const char* block);

  std::array<uint64_t, 4> lanes_ = {0x243F6A8885A308D3U, 0x13198A2E03707344U, 0xA4093822299F31D0U,
                                    0x082EFA98EC4E6C89U};
  std::array<char, kBlock> rest_{};  // bytes that do not fill a block yet
  uint64_t length_ = 0;
};

}  // namespace tessera::data
