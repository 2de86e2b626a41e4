#include "launcher/session.h"

#include <poll.h>

namespace tessera::launcher {

int Session::flush() {
  output.write_some();
  while (output.has_pending()) {
    std::vector<pollfd> fds{{signals.fd(), POLLIN, 0}};
    output.add_pending(fds);
    ::poll(fds.data(), fds.size(), -1);
    while (const auto signal = signals.next()) {
      if (ends_job(*signal)) return *signal;
    }
    output.write_some();
  }
  return 0;
}

}  // namespace tessera::launcher
