#include "train/terminal.h"

#include "numbers.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace tessera::train {

int terminal_columns() {
  if (const char* told = std::getenv(kColumnsVariable))
    return tool::parse_number<int>(told).value_or(0);
  // These give each rank a terminal of its own and collect what is written to it, maybe in a file.
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_STEP_ID"}) {
    if (std::getenv(name) != nullptr) return 0;
  }
  const char* kind = std::getenv("TERM");
  if (!isatty(STDOUT_FILENO) || (kind != nullptr && std::strcmp(kind, "dumb") == 0)) return 0;
  winsize size{};
  const bool is_known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return is_known ? size.ws_col : 80;
}

}  // namespace tessera::train
