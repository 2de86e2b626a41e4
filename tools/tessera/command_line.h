#pragma once

#include <string>
#include <vector>

namespace tessera::tool {

/// What passes between main and the subcommands beside CLI11's options.
struct CommandLine {
  std::vector<std::string> program;  // the words after `--`, never parsed
  int exit_code = 0;                 // of the whole command; a subcommand's callback sets it
};

}  // namespace tessera::tool
