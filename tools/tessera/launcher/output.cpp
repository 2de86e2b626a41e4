#include "launcher/output.h"

#include <sys/stat.h>
#include <unistd.h>

namespace tessera::launcher {
namespace {

bool same_file(int one, int other) {
  struct stat first;
  struct stat second;
  return ::fstat(one, &first) == 0 && ::fstat(other, &second) == 0 &&
         first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

}  // namespace

Output::Output() : out_(std::make_shared<Sink>(STDOUT_FILENO)) {
  const bool shared = same_file(STDOUT_FILENO, STDERR_FILENO);
  err_ = shared ? out_ : std::make_shared<Sink>(STDERR_FILENO);
}

void Output::say(std::string_view message) {
  err_->append("tessera run: " + std::string(message) + "\n");
}

void Output::add_pending(std::vector<pollfd>& fds) const {
  if (out_->has_pending()) fds.push_back({out_->fd(), POLLOUT, 0});
  if (err_ != out_ && err_->has_pending()) fds.push_back({err_->fd(), POLLOUT, 0});
}

void Output::write_some() {
  out_->write_some();
  if (err_ != out_) err_->write_some();
}

}  // namespace tessera::launcher
