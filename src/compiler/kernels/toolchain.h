#pragma once

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

}  // namespace tessera::compiler
