#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::train {

template <class Integer>
void append_little_endian(std::string& bytes, Integer value) {
  for (std::size_t at = 0; at < sizeof(Integer); ++at)
    bytes += static_cast<char>((value >> (8 * at)) & 0xff);
}

/// A protobuf message, field by field; a message within a message is a field of bytes.
class Message {
 public:
  void integer(int field, std::uint64_t value) {
    varint(key(field, 0));
    varint(value);
  }
  void number(int field, double value) {
    varint(key(field, 1));
    append_little_endian(data_, std::bit_cast<std::uint64_t>(value));
  }
  void bytes(int field, std::string_view value) {
    varint(key(field, 2));
    varint(value.size());
    data_ += value;
  }
  void number(int field, float value) {
    varint(key(field, 5));
    append_little_endian(data_, std::bit_cast<std::uint32_t>(value));
  }

  const std::string& data() const { return data_; }

 private:
  /// The number of a field and how its value is written.
  static std::uint64_t key(int field, int wire_type) {
    return (static_cast<std::uint64_t>(field) << 3) | static_cast<std::uint64_t>(wire_type);
  }
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) data_ += static_cast<char>((value & 0x7f) | 0x80);
    data_ += static_cast<char>(value);
  }

  std::string data_;
};

}  // namespace tessera::train
