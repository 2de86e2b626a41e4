#include "launcher/store_socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace tessera::launcher {

StoreSocket listen_for_store() {
  constexpr const char* kAction = "cannot listen on 127.0.0.1 for the ranks' store";
  StoreSocket store;
  store.listener.reset(checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), kAction));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof(address);
  checked(::bind(store.listener.get(), generic, length), kAction);
  checked(::listen(store.listener.get(), SOMAXCONN), kAction);
  checked(::getsockname(store.listener.get(), generic, &length), kAction);
  store.address = "tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  return store;
}

}  // namespace tessera::launcher
