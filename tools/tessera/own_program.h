#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tessera::tool {

/// This program's file; what belongs to it lies beside it.
std::filesystem::path own_program();

/// The path of another program of ours; throws std::runtime_error if it is not there.
std::string program_beside(const std::string& name);

/// Becomes the program words[0]; throws std::system_error if that is not possible.
[[noreturn]] void become(std::vector<std::string> words);

}  // namespace tessera::tool
