#include "launcher/store_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>

namespace tessera::launcher {

StoreSocket listen_for_store() {
  constexpr const char* kAction = "cannot listen on a local socket for the ranks' store";
  StoreSocket store;
  store.listener.reset(checked(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), kAction));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  // An address without a name asks the kernel for one.
  checked(::bind(store.listener.get(), generic, sizeof(sa_family_t)), kAction);
  checked(::listen(store.listener.get(), SOMAXCONN), kAction);
  socklen_t length = sizeof(address);
  checked(::getsockname(store.listener.get(), generic, &length), kAction);
  // The name follows a zero byte.
  constexpr std::size_t kBefore = offsetof(sockaddr_un, sun_path) + 1;
  store.address = "unix://@" + std::string(address.sun_path + 1, length - kBefore);
  return store;
}

}  // namespace tessera::launcher
