#include "launcher/orphans.h"

#include "launcher/descriptor.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace tessera::launcher {
namespace {

/// The children of this process, by a look at every process: no call lists them.
std::vector<Orphans::Orphan> children() {
  std::vector<Orphans::Orphan> found;
  const pid_t self = ::getpid();
  std::error_code ignored;  // processes come and go during the look
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(entry.path() / "stat");
    std::string line;
    if (!std::getline(file, line, '\0')) continue;
    // "pid (name) state parent group …"; the name may hold anything, even ')' and newlines.
    const auto name_end = line.rfind(") ");
    if (name_end == std::string::npos || name_end + 4 >= line.size()) continue;
    char* rest = line.data() + name_end + 4;
    if (std::strtol(rest, &rest, 10) != self) continue;
    found.push_back({std::stoi(name), static_cast<pid_t>(std::strtol(rest, nullptr, 10))});
  }
  return found;
}

}  // namespace

Orphans::Orphans() {
  checked(::prctl(PR_SET_CHILD_SUBREAPER, 1), "PR_SET_CHILD_SUBREAPER");
  for (const auto& child : children()) excluded_.insert(child.pid);
}

std::vector<Orphans::Orphan> Orphans::reap() {
  std::vector<Orphan> living;
  for (const auto& child : children()) {
    if (excluded_.contains(child.pid)) continue;
    if (::waitpid(child.pid, nullptr, WNOHANG) == 0) living.push_back(child);
  }
  return living;
}

void Orphans::kill_all() {
  // Each one that ends hands its own children to us, hence the repetition.
  for (auto living = reap(); !living.empty(); living = reap()) {
    for (const auto& orphan : living) ::kill(orphan.pid, SIGKILL);
    for (const auto& orphan : living) ::waitpid(orphan.pid, nullptr, 0);
  }
}

}  // namespace tessera::launcher
