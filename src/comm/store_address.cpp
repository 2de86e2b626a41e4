#include "comm/store_address.h"

#include "base/environment.h"
#include "comm/local_socket.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace tessera::comm {
namespace {

constexpr const char* kTcp = "tcp://";
constexpr const char* kFile = "file://";
constexpr const char* kUnix = "unix://@";

StoreAddress parse_tcp(const std::string& init_method) {
  const std::string place = init_method.substr(std::string(kTcp).size());
  const auto colon = place.rfind(':');
  std::string host = place.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  const auto port = colon == std::string::npos ? std::nullopt : parse_int(place.substr(colon + 1));
  TORCH_CHECK_VALUE(
      !host.empty() && port && *port > 0 && *port < 65536,
      "init: expected init_method \"tcp://host:port\" with a port from 1 to 65535, got \"",
      init_method, "\"");
  return {.kind = StoreAddress::Kind::Tcp, .host = host, .port = static_cast<uint16_t>(*port)};
}

StoreAddress parse_file(const std::string& init_method) {
  const std::string path = init_method.substr(std::string(kFile).size());
  TORCH_CHECK_VALUE(
      path.size() > 1 && path.front() == '/' && path.back() != '/',
      "init: expected init_method \"file:///path\" with the absolute path of a file, got \"",
      init_method, "\"; a relative path would mean another file in another working directory");
  return {.kind = StoreAddress::Kind::File, .path = path};
}

StoreAddress parse_unix(const std::string& init_method) {
  const std::string name = init_method.substr(std::string(kUnix).size());
  TORCH_CHECK_VALUE(!name.empty() && name.size() <= kLongestSocketName,
                    "init: expected init_method \"unix://@name\" with a name of 1 to ",
                    kLongestSocketName, " characters, got \"", init_method, "\"");
  return {.kind = StoreAddress::Kind::Unix, .name = name};
}

}  // namespace

StoreAddress parse_store_address(const std::string& init_method) {
  if (init_method.starts_with(kTcp)) return parse_tcp(init_method);
  if (init_method.starts_with(kFile)) return parse_file(init_method);
  if (init_method.starts_with(kUnix)) return parse_unix(init_method);
  TORCH_CHECK_VALUE(false, "init: unknown scheme in init_method \"", init_method,
                    "\"; expected \"tcp://host:port\", \"file:///path\" or \"unix://@name\"");
}

std::string tcp_address(const std::string& host, int64_t port) {
  const bool is_ipv6 = host.find(':') != std::string::npos && host.front() != '[';
  return is_ipv6 ? c10::str(kTcp, "[", host, "]:", port) : c10::str(kTcp, host, ":", port);
}

}  // namespace tessera::comm
