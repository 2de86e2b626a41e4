#include "comm/host.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace tessera::comm {

namespace {

std::string own_namespace(const char* kind) {
  std::error_code error;
  const auto name = std::filesystem::read_symlink(std::string("/proc/self/ns/") + kind, error);
  return error ? "unknown" : name.string();
}

}  // namespace

std::string host_identity() {
  std::string boot = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot + "/" + own_namespace("pid") + "/user:" + std::to_string(getuid());
}

std::string network_identity() { return own_namespace("net"); }

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown host";
}

}  // namespace tessera::comm
