#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

/// The C++ compiler of this machine.
struct Toolchain {
  std::vector<std::string> command;  // the program by its path, then what $CXX adds to it
  std::string identity;              // differs between compilers, their versions, and processors

  /// $CXX, or the first of c++, g++ and clang++ on PATH. None: `why_not` says what was looked for.
  static std::optional<Toolchain> find(std::string* why_not);

  /// The options that kernels are compiled with. Contraction and fast-math would change results.
  static const std::vector<std::string>& options();
  /// Makes a shared library. False: `why_not` is what the compiler said.
  bool compile(const std::string& source, const std::string& library, std::string* why_not) const;
};

/// What the runtime does for kernels of the host. Every generated source repeats its declaration
/// (prelude.cpp), since it includes no header of ours; whoever changes it changes kHostInterface
/// too, so that no library made for another one is loaded.
struct Host {
  /// Calls `part` for ranges that make up [0, count), on several threads if they can be `grain`
  /// long.
  void (*run)(int64_t count, int64_t grain, void (*part)(const void*, int64_t, int64_t),
              const void* closure);
};
constexpr int kHostInterface = 3;
constexpr const char* kHostInterfaceSymbol = "tessera_host_interface";  // an int

using HostKernel = void (*)(const Host&, void* const* tensors);

/// Kernels of the host, compiled and loaded; unloaded with the last owner.
class HostLibrary {
 public:
  /// Compiles `source`, or finds what was compiled of it before: in this process, or in the cache
  /// folder (kernel_cache.h) by any process of this user. Ranks that ask at the same time compile
  /// once; the others wait, `patience` long at most. An entry that holds no kernels of this
  /// interface is compiled anew. Null where there is no compiler, where the compiler or the loader
  /// refuses, the wait was too long, or no folder can be written to: `why_not` says which, and what
  /// to do.
  static std::shared_ptr<HostLibrary> load(
      const std::string& source, std::string* why_not,
      std::chrono::milliseconds patience = std::chrono::minutes(5));
  ~HostLibrary();
  HostLibrary(const HostLibrary&) = delete;
  HostLibrary& operator=(const HostLibrary&) = delete;

  /// Null if there is none.
  void* symbol(const std::string& name) const;

 private:
  explicit HostLibrary(void* library) : library_(library) {}

  void* library_;
};

}  // namespace tessera::compiler
