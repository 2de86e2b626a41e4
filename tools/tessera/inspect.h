#pragma once

#include "command_line.h"

#include <CLI/CLI.hpp>

namespace tessera::tool {

/// Registers `tessera inspect`: the program tessera-inspect that lies beside this one.
void add_inspect_command(CLI::App& app, CommandLine& line);

}  // namespace tessera::tool
