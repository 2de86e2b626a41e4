#pragma once

#include "tessera/command_line.h"

#include <CLI/CLI.hpp>

namespace tessera::tool {

/// Registers `tessera report`: run folders as one HTML page.
void add_report_command(CLI::App& app, CommandLine& line);

}  // namespace tessera::tool
