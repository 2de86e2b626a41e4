#include "bench.h"
#include "command_line.h"
#include "run.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>

namespace {

using tessera::tool::CommandLine;

constexpr int kUsageError = 2;

// One row per subcommand, each declared in a header of its name.
constexpr void (*kCommands[])(CLI::App&, CommandLine&) = {
    tessera::tool::add_run_command,
    tessera::tool::add_bench_command,
};

int usage_error(const CLI::App& app, const CLI::ParseError& error) {
  std::string command = "tessera";
  for (const auto* subcommand : app.get_subcommands()) command += " " + subcommand->get_name();
  std::cerr << command << ": " << error.what() << "; see " << command << " --help\n";
  return kUsageError;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Composable distributed training for C++ on libtorch", "tessera");
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  app.require_subcommand(1);
  CommandLine line;
  for (const auto add_command : kCommands) add_command(app, line);

  std::vector<std::string> arguments(argv + 1, argv + argc);
  tessera::tool::take_program(app, arguments, line);
  std::ranges::reverse(arguments);  // as CLI11 takes them
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error) : usage_error(app, error);
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return 1;
  }
  return line.exit_code;
}
