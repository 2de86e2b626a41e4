#pragma once

#include "command_line.h"

#include <CLI/CLI.hpp>

namespace tessera::tool {

/// Registers `tessera train`: ranks of the program tessera-train that lies beside this one, or,
/// inside of a job that has ranks already, one of them.
void add_train_command(CLI::App& app, CommandLine& line);

}  // namespace tessera::tool
