#include "private_cache.h"

#include <c10/util/Exception.h>

#include <cstdlib>

namespace tessera::benchmarks {

FreshCache::FreshCache() {
  auto name = (std::filesystem::temp_directory_path() / "tessera-bench-XXXXXX").string();
  TORCH_CHECK(mkdtemp(name.data()) != nullptr, "bench compile: no folder like ", name,
              " could be made; set TMPDIR to one that can be written");
  path_ = name;
  setenv("TESSERA_CACHE", name.c_str(), /*overwrite=*/1);
}

FreshCache::~FreshCache() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace tessera::benchmarks
