#include "adopt/adopt.h"
#include "command_line.h"
#include "programs.h"
#include "report/report.h"
#include "run.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>

namespace {

using tessera::tool::CommandLine;

constexpr int kUsageError = 2;

// One row per subcommand, each declared in a header of its name.
constexpr void (*kCommands[])(CLI::App&, CommandLine&) = {
    tessera::tool::add_run_command,     tessera::tool::add_train_command,
    tessera::tool::add_inspect_command, tessera::tool::add_bench_command,
    tessera::tool::add_report_command,  tessera::tool::add_adopt_command,
    tessera::tool::add_export_command,  tessera::tool::add_tokenize_command,
};

/// CLI11's own words tell of its types and counts.
std::string describe(const CLI::App& app, const CLI::ParseError& error) {
  const std::string text = error.what();
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr)
    return "expected a value after " + text.substr(0, text.find(':'));
  if (app.get_subcommands().empty() && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    std::string names;
    for (const auto* known : app.get_subcommands({}))
      names += (names.empty() ? "" : ", ") + known->get_name();
    return "expected one of the subcommands " + names;
  }
  return text;
}

int usage_error(const CLI::App& app, const std::string& subcommand, const CLI::ParseError& error) {
  const std::string command = app.get_name() + (subcommand.empty() ? "" : " " + subcommand);
  std::cerr << command << ": " << describe(app, error) << "; see " << command << " --help\n";
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
  const bool has_subcommand =
      !arguments.empty() && tessera::tool::find_subcommand(app, arguments[0]) != nullptr;
  const std::string subcommand = has_subcommand ? arguments[0] : "";
  try {
    tessera::tool::refuse_unknown_words(app, arguments);
    std::ranges::reverse(arguments);  // as CLI11 takes them
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error) : usage_error(app, subcommand, error);
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return 1;
  }
  return line.exit_code;
}
