#include "comm/store_protocol.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace tessera::comm {
namespace {

struct Address {
  sockaddr_un content{};
  socklen_t length = 0;
  sockaddr* generic() { return reinterpret_cast<sockaddr*>(&content); }
};

/// A name after a zero byte is in the kernel's table, not in the file system.
Address address_of(const std::string& name) {
  Address address;
  address.content.sun_family = AF_UNIX;
  std::memcpy(address.content.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

LocalSocket make_socket() {
  return LocalSocket(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

static_assert(kLongestSocketName < sizeof(sockaddr_un::sun_path));

LocalSocket& LocalSocket::operator=(LocalSocket&& other) noexcept {
  if (this != &other) {
    reset();
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

void LocalSocket::reset() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

LocalSocket listen_locally(const std::string& name) {
  auto listener = make_socket();
  auto address = address_of(name);
  if (listener.is_open() && (bind(listener.get(), address.generic(), address.length) != 0 ||
                             listen(listener.get(), SOMAXCONN) != 0)) {
    const int error = errno;
    listener.reset();
    errno = error;
  }
  return listener;
}

LocalSocket connect_locally(const std::string& name) {
  auto connection = make_socket();
  auto address = address_of(name);
  if (connection.is_open() && connect(connection.get(), address.generic(), address.length) != 0) {
    const int error = errno;
    connection.reset();
    errno = error;
  }
  return connection;
}

bool listens_locally(int descriptor, const std::string& name) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  if (getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0)
    return false;
  Address bound;
  bound.length = sizeof(bound.content);
  const auto wanted = address_of(name);
  return getsockname(descriptor, bound.generic(), &bound.length) == 0 &&
         bound.length == wanted.length &&
         std::memcmp(&bound.content, &wanted.content, wanted.length) == 0;
}

bool is_same_user(int descriptor) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         peer.uid == geteuid();
}

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
