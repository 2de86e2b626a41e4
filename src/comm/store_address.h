#pragma once

#include <cstdint>
#include <string>

namespace tessera::comm {

/// Where the ranks' store is: "tcp://host:port", "file:///path" or "unix://@name".
struct StoreAddress {
  enum class Kind { Tcp, File, Unix };
  Kind kind = Kind::Tcp;
  std::string host = {};  // Tcp
  uint16_t port = 0;      // Tcp
  std::string path = {};  // File; absolute
  std::string name = {};  // Unix; of a socket that no file stands for
};

/// Throws ValueError naming what is wrong with `init_method` and what is expected.
StoreAddress parse_store_address(const std::string& init_method);

/// "tcp://host:port"; an IPv6 address gets its brackets.
std::string tcp_address(const std::string& host, int64_t port);

}  // namespace tessera::comm
