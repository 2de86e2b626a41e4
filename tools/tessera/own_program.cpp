#include "own_program.h"

#include <unistd.h>

#include <stdexcept>
#include <system_error>

namespace tessera::tool {

std::filesystem::path own_program() { return std::filesystem::read_symlink("/proc/self/exe"); }

std::string program_beside(const std::string& name) {
  const auto program = own_program().parent_path() / name;
  if (!std::filesystem::exists(program))
    throw std::runtime_error("expected " + program.string() + ", found none; make build makes it");
  return program.string();
}

void become(std::vector<std::string> words) {
  std::vector<char*> raw;
  for (auto& word : words) raw.push_back(word.data());
  raw.push_back(nullptr);
  execv(words[0].c_str(), raw.data());
  throw std::system_error(errno, std::generic_category(), words[0]);
}

}  // namespace tessera::tool
