#pragma once

#include <filesystem>
#include <string>

namespace tessera::benchmarks {

/// An empty folder for kernels, while it lives: TESSERA_CACHE of this process.
class FreshCache {
 public:
  FreshCache();
  ~FreshCache();
  FreshCache(const FreshCache&) = delete;
  FreshCache& operator=(const FreshCache&) = delete;

  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::benchmarks
