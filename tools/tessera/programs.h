#pragma once

#include "command_line.h"

#include <CLI/CLI.hpp>

namespace tessera::tool {

/// Registers `tessera train`: ranks of the program tessera-train that lies beside this one, or,
/// inside of a job that has ranks already, one of them.
void add_train_command(CLI::App& app, CommandLine& line);

/// Registers `tessera inspect`: the program tessera-inspect that lies beside this one.
void add_inspect_command(CLI::App& app, CommandLine& line);

/// Registers `tessera export`: the program tessera-export that lies beside this one.
void add_export_command(CLI::App& app, CommandLine& line);

/// Registers `tessera tokenize`: the program tessera-tokenize that lies beside this one.
void add_tokenize_command(CLI::App& app, CommandLine& line);

// Of --ranks, which `tessera bench` takes itself and the questions show in their help.
inline constexpr int kBenchRanks = 2;
inline constexpr const char* kBenchRanksHelp = "Number of ranks, one thread each";

/// `tessera bench QUESTION`: runs the program tessera-bench-QUESTION that lies beside this one.
void add_bench_command(CLI::App& app, CommandLine& line);

}  // namespace tessera::tool
