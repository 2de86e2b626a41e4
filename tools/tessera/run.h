#pragma once

#include "command_line.h"

#include <CLI/CLI.hpp>

namespace tessera::tool {

/// Registers `tessera run`: N local ranks of a program.
void add_run_command(CLI::App& app, CommandLine& line);

/// Moves the words of the program that is to be run from `arguments` to `line.program`: all that
/// follows `--`, or `run`'s first word that is neither an option nor an option's value.
/// CLI11 must not see them; it rewrites some ("[a,b]" becomes two words).
void take_program(const CLI::App& app, std::vector<std::string>& arguments, CommandLine& line);

}  // namespace tessera::tool
