#include "comm/store_wire.h"

#include <cstring>

namespace tessera::comm {
namespace {

template <class T>
void put(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

/// Takes the next value off the front; false if there are too few bytes.
template <class T>
bool take(std::string_view& bytes, T& value) {
  if (bytes.size() < sizeof(value)) return false;
  std::memcpy(&value, bytes.data(), sizeof(value));
  bytes.remove_prefix(sizeof(value));
  return true;
}

bool take_word(std::string_view& bytes, std::string& word) {
  uint32_t length = 0;
  if (!take(bytes, length) || length > bytes.size()) return false;
  word.assign(bytes.substr(0, length));
  bytes.remove_prefix(length);
  return true;
}

}  // namespace

std::optional<std::string> encode(const StoreMessage& message) {
  size_t total = sizeof(uint8_t) + sizeof(int64_t) + sizeof(uint32_t);
  for (const auto& word : message.words) total += sizeof(uint32_t) + word.size();
  if (total > kLargestStoreMessage) return std::nullopt;
  std::string bytes;
  bytes.reserve(kFrameHeader + total);
  put(bytes, static_cast<uint32_t>(total));
  put(bytes, static_cast<uint8_t>(message.code));
  put(bytes, message.number);
  put(bytes, static_cast<uint32_t>(message.words.size()));
  for (const auto& word : message.words) {
    put(bytes, static_cast<uint32_t>(word.size()));
    bytes += word;
  }
  return bytes;
}

std::optional<size_t> message_bytes(std::string_view bytes) {
  uint32_t total = 0;
  if (!take(bytes, total) || total > kLargestStoreMessage) return std::nullopt;
  return total;
}

std::optional<StoreMessage> decode(std::string_view bytes) {
  StoreMessage message;
  uint8_t code = 0;
  uint32_t count = 0;
  if (!take(bytes, code) || !take(bytes, message.number) || !take(bytes, count))
    return std::nullopt;
  if (code > static_cast<uint8_t>(StoreCode::Refused)) return std::nullopt;
  message.code = static_cast<StoreCode>(code);
  // Every word takes its length at least: a count that lies makes no memory.
  if (count > bytes.size() / sizeof(uint32_t)) return std::nullopt;
  message.words.resize(count);
  for (auto& word : message.words) {
    if (!take_word(bytes, word)) return std::nullopt;
  }
  if (!bytes.empty()) return std::nullopt;
  return message;
}

}  // namespace tessera::comm
