#include "comm/host.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace tessera::comm {

std::string host_identity() {
  std::string boot = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code error;
  const auto space = std::filesystem::read_symlink("/proc/self/ns/pid", error).string();
  return boot + "/" + space + "/user:" + std::to_string(getuid());
}

}  // namespace tessera::comm
