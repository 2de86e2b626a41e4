#include "shared_mappings.h"

#include <c10/util/Exception.h>

#include <fstream>
#include <sstream>

namespace tessera::benchmarks {

std::map<std::string, size_t> SharedMappings::list() {
  std::ifstream file("/proc/self/maps");
  TORCH_CHECK(file, "bench memory: expected to read /proc/self/maps, which lists shared memory");
  std::map<std::string, size_t> found;
  for (std::string line; std::getline(file, line);) {
    if (line.find("/memfd:tessera") == std::string::npos) continue;
    // "begin-end rights offset device inode path": the inode tells an address that is used again.
    std::istringstream words(line);
    std::string range;
    std::string skipped;
    std::string inode;
    words >> range >> skipped >> skipped >> skipped >> inode;
    const auto dash = range.find('-');
    const auto begin = std::stoull(range.substr(0, dash), nullptr, 16);
    const auto end = std::stoull(range.substr(dash + 1), nullptr, 16);
    found[inode + " " + range] = end - begin;
  }
  return found;
}

size_t SharedMappings::bytes() const {
  size_t bytes = 0;
  for (const auto& [mapping, size] : list()) {
    if (!before_.contains(mapping)) bytes += size;
  }
  return bytes;
}

}  // namespace tessera::benchmarks
