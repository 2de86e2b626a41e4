#pragma once

#include "command_line.h"

#include <CLI/CLI.hpp>

namespace tessera::tool {

/// `tessera bench QUESTION`: runs the program tessera-bench-QUESTION that lies beside this one.
void add_bench_command(CLI::App& app, CommandLine& line);

}  // namespace tessera::tool
