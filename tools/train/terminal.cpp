#include "train/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace tessera::train {

int terminal_columns() {
  if (const char* told = std::getenv(kColumnsVariable)) return std::atoi(told);
  const char* kind = std::getenv("TERM");
  if (!isatty(STDOUT_FILENO) || (kind != nullptr && std::strcmp(kind, "dumb") == 0)) return 0;
  winsize size{};
  const bool is_known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return is_known ? size.ws_col : 80;
}

}  // namespace tessera::train
