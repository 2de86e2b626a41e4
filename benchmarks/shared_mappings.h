#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace tessera::benchmarks {

/// Shared memory that this process has mapped since the object was made. The kernel is asked:
/// libtorch's allocator does not see it.
class SharedMappings {
 public:
  SharedMappings() : before_(list()) {}
  /// Of the mappings that are there and were not then; their pages are reserved in full.
  size_t bytes() const;

 private:
  static std::map<std::string, size_t> list();  // by where and of what they are

  std::map<std::string, size_t> before_;
};

}  // namespace tessera::benchmarks
