#pragma once

#include "tessera/command_line.h"

#include <CLI/CLI.hpp>

namespace tessera::tool {

/// Registers `tessera adopt`: makes the modules of a libtorch program hookable.
void add_adopt_command(CLI::App& app, CommandLine& line);

}  // namespace tessera::tool
