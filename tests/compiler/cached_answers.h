#pragma once

#include "compiler/kernels/host_library.h"
#include "support/temporary_folder.h"
#include "support/variables.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace tessera::compiler {

namespace fs = std::filesystem;

/// A library with a function to know it by.
inline std::string source_of(int answer, int interface = kHostInterface) {
  const std::string symbol = kHostInterfaceSymbol;
  return "extern \"C\" {\nextern const int " + symbol + ";\nconst int " + symbol + " = " +
         std::to_string(interface) + ";\nint answer() { return " + std::to_string(answer) +
         "; }\n}\n";
}

using testing::Variables;

/// A cache of its own and a compiler that counts how often it is called.
class CodegenCache : public ::testing::Test {
 protected:
  CodegenCache()
      : cache_(folder_.path() / "cache"),
        variables_({{"TESSERA_CACHE", cache_}, {"CXX", folder_.path() / "counting"}}) {
    script("counting", "echo >> " + count_file() + "\n/usr/bin/env c++ \"$@\"\n");
  }

  /// A program that stands for a compiler.
  std::string script(const std::string& name, const std::string& text) const {
    const fs::path path = folder_.path() / name;
    std::ofstream(path) << "#!/bin/sh\n" << text;
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }

  std::string count_file() const { return folder_.path() / "count"; }

  int compilations() const {
    std::ifstream file(count_file());
    int lines = 0;
    for (std::string line; std::getline(file, line);) ++lines;
    return lines;
  }

  fs::path only_library() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(cache_)) {
      if (entry.path().extension() == ".so") found.push_back(entry.path());
    }
    EXPECT_EQ(found.size(), 1U);
    return found.empty() ? fs::path() : found[0];
  }

  static int answer_of(const std::shared_ptr<HostLibrary>& module) {
    if (!module) return -1;
    const auto answer = reinterpret_cast<int (*)()>(module->symbol("answer"));
    return answer == nullptr ? -2 : answer();
  }

  static int load_answer() {
    std::string why;
    const auto module = HostLibrary::load(source_of(42), &why);
    EXPECT_TRUE(module) << why;
    return answer_of(module);
  }

  const testing::TemporaryFolder folder_;
  const std::string cache_;
  const Variables variables_;
};

}  // namespace tessera::compiler
