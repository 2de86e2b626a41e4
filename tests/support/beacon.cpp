#include "support/beacon.h"

#include "support/rank_run.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace tessera::testing {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Wakes up when a file appears in the folder.
class FolderWatch {
 public:
  explicit FolderWatch(const std::filesystem::path& folder)
      : descriptor_(inotify_init1(IN_CLOEXEC | IN_NONBLOCK)) {
    if (descriptor_ < 0 || inotify_add_watch(descriptor_, folder.c_str(), IN_CREATE) < 0) {
      const int error = errno;
      if (descriptor_ >= 0) close(descriptor_);
      throw std::system_error(error, std::generic_category(),
                              "Beacon: inotify on " + folder.string());
    }
  }
  ~FolderWatch() { close(descriptor_); }
  FolderWatch(const FolderWatch&) = delete;
  FolderWatch& operator=(const FolderWatch&) = delete;

  void wait(milliseconds timeout) const {
    pollfd descriptor{.fd = descriptor_, .events = POLLIN, .revents = 0};
    if (poll(&descriptor, 1, static_cast<int>(timeout.count())) <= 0) return;
    char events[4096];
    while (read(descriptor_, events, sizeof events) > 0) {
    }
  }

 private:
  int descriptor_;
};

}  // namespace

Beacon::Beacon(const std::string& name) : Beacon(current_run().folder, name) {}

Beacon::Beacon(const std::filesystem::path& folder, const std::string& name) {
  if (!folder.empty()) file_ = folder / ("beacon." + name);
}

void Beacon::signal() const {
  if (file_.empty()) return;
  const int descriptor = open(file_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor < 0)
    throw std::system_error(errno, std::generic_category(), "Beacon: " + file_.string());
  close(descriptor);
}

bool Beacon::signalled() const { return file_.empty() || std::filesystem::exists(file_); }

bool Beacon::wait(milliseconds timeout) const {
  if (signalled()) return true;
  const FolderWatch watch(file_.parent_path());
  const auto deadline = steady_clock::now() + timeout;
  while (!signalled()) {  // asked after the watch exists, so that no signal falls between
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) return false;
    watch.wait(left);
  }
  return true;
}

}  // namespace tessera::testing
