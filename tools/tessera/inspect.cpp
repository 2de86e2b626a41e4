#include "inspect.h"

#include "own_program.h"

namespace tessera::tool {

void add_inspect_command(CLI::App& app, CommandLine& /*line*/) {
  auto* inspect = app.add_subcommand(
      "inspect", "List what a checkpoint, a file or a run holds; draw a compiled program");
  inspect->set_help_flag();  // all its words are the program's
  inspect->allow_extras();
  inspect->callback([inspect] {
    std::vector<std::string> words = {program_beside("tessera-inspect")};
    const auto arguments = inspect->remaining();
    words.insert(words.end(), arguments.begin(), arguments.end());
    become(std::move(words));
  });
}

}  // namespace tessera::tool
