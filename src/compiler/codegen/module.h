#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace tessera::compiler {

/// A generated program, compiled and loaded; unloaded with the last owner.
class Module {
 public:
  /// Compiles `source`, or finds what was compiled of it before: in this process, or in the cache
  /// folder (cache_folder.h) by any process of this user. Ranks that ask at the same time compile
  /// once; the others wait, `patience` long at most. An entry that holds no program of this
  /// interface (program_interface.h) is compiled anew. Null where there is no compiler, where the
  /// compiler or the loader refuses, the wait was too long, or no folder can be written to:
  /// `why_not` says which, and what to do.
  static std::shared_ptr<Module> load(const std::string& source, std::string* why_not,
                                      std::chrono::milliseconds patience = std::chrono::minutes(5));
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// The address of an exported name; null if there is none.
  void* symbol(const std::string& name) const;

 private:
  explicit Module(void* library) : library_(library) {}
  void* library_;
};

}  // namespace tessera::compiler
