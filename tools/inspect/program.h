#pragma once

#include <tessera/compile.h>

#include <filesystem>
#include <string>

namespace tessera::inspect {

/// A compiled program that was kept as a file.
struct ProgramFile {
  std::filesystem::path path;
  ProgramLayout layout;
};

/// Of the text of a graph: a file, the program.txt of a run of `tessera train --compile`, or the
/// last file of a CompileOptions::dump_folder. Throws a std::exception that names the file, and the
/// line in it, if it is none of these or damaged.
ProgramFile read_program(const std::filesystem::path& path);

/// One HTML page: memory over the instructions, the instructions, their kernels.
std::string to_page(const ProgramFile& program);
/// The same for programs.
std::string to_json(const ProgramFile& program);

}  // namespace tessera::inspect
