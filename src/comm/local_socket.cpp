#include "comm/local_socket.h"

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

}  // namespace tessera::comm
