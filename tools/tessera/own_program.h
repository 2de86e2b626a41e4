#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tessera::tool {

/// This program's file; what belongs to it lies beside it.
std::filesystem::path own_program();

/// The path of another program of ours; throws std::runtime_error if it is not there.
std::string program_beside(const std::string& name);

/// What a user types, in the current folder, for the `tessera` that lies beside this program: its
/// name where PATH finds that one, else the shorter of its paths.
std::string tessera_command();

/// Becomes the program words[0]; throws std::system_error if that is not possible.
[[noreturn]] void become(std::vector<std::string> words);

}  // namespace tessera::tool
