#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace tessera::tool {

/// What passes between main and the subcommands beside CLI11's options.
struct CommandLine {
  std::vector<std::string> program;  // the words after `--`, never parsed
  int exit_code = 0;                 // of the whole command; a subcommand's callback sets it
};

/// Throws CLI::ValidationError for the first subcommand or option among `arguments` that `app` and
/// its subcommand do not know, naming the one that was probably meant. CLI11 would speak of what
/// is missing instead. Words that a subcommand passes on are not looked at.
void refuse_unknown_words(const CLI::App& app, const std::vector<std::string>& arguments);

/// The same for the options of one command.
void refuse_unknown_options(const CLI::App& app, const std::vector<std::string>& arguments);

/// The subcommand of this name; null if there is none.
const CLI::App* find_subcommand(const CLI::App& app, const std::string& name);

/// What of `valid` is nearest to `word` by letters changed, added and left out; empty if nothing is
/// near.
std::string nearest_word(const std::string& word, const std::vector<std::string>& valid);

}  // namespace tessera::tool
