#pragma once

#include "command_line.h"

#include <CLI/CLI.hpp>

namespace tessera::tool {

// Of --ranks, which `tessera bench` takes itself and the questions show in their help.
inline constexpr int kBenchRanks = 2;
inline constexpr const char* kBenchRanksHelp = "Number of ranks, one thread each";

/// `tessera bench QUESTION`: runs the program tessera-bench-QUESTION that lies beside this one.
void add_bench_command(CLI::App& app, CommandLine& line);

}  // namespace tessera::tool
