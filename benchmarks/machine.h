#pragma once

#include <filesystem>
#include <string>

namespace tessera::benchmarks {

/// Date, processor, cores, memory, kernel, compiler and libtorch: what a table of times needs to
/// mean anything.
std::string describe_machine();

/// Writes `describe_machine()` next to a table: results/x.csv -> results/x.machine.txt.
void write_machine_beside(const std::filesystem::path& table);

}  // namespace tessera::benchmarks
