#include "own_program.h"

#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <system_error>

namespace tessera::tool {
namespace {

namespace fs = std::filesystem;

/// What a shell takes a name for; empty: nothing.
fs::path found_in_path(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const auto file = fs::path(folder) / name;
    std::error_code error;
    if (fs::is_regular_file(file, error) && access(file.c_str(), X_OK) == 0) return file;
  }
  return {};
}

}  // namespace

fs::path own_program() { return fs::read_symlink("/proc/self/exe"); }

std::string program_beside(const std::string& name) {
  const auto program = own_program().parent_path() / name;
  if (!fs::exists(program))
    throw std::runtime_error("expected " + program.string() + ", found none; make build makes it");
  return program.string();
}

std::string tessera_command() {
  const char* name = "tessera";
  std::error_code error;
  const auto program = fs::read_symlink("/proc/self/exe", error).parent_path() / name;
  if (!fs::exists(program, error) || fs::equivalent(program, found_in_path(name), error))
    return name;
  auto nearby = fs::proximate(program, error);
  if (!nearby.has_parent_path()) nearby = "." / nearby;  // or a shell would look for it in PATH
  const bool is_shorter = !error && nearby.native().size() < program.native().size();
  return (is_shorter ? nearby : program).string();
}

void become(std::vector<std::string> words) {
  std::vector<char*> raw;
  for (auto& word : words) raw.push_back(word.data());
  raw.push_back(nullptr);
  execv(words[0].c_str(), raw.data());
  throw std::system_error(errno, std::generic_category(), words[0]);
}

}  // namespace tessera::tool
