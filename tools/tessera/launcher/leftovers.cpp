#include "launcher/descriptor.h"
#include "launcher/orphans.h"
#include "launcher/watcher.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace tessera::launcher {

/// A small process that outlives a launcher killed by SIGKILL, to kill the process groups of its
/// ranks. The ranks themselves die with the launcher anyway (PR_SET_PDEATHSIG); what they have
/// started would not.
class Watcher {
 public:
  /// Forks. To be made before anything the watcher should not hold open, and after the SignalInbox,
  /// whose blocked signals it inherits: what ends the launcher in an orderly way must not end it.
  Watcher();
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  pid_t pid() const { return pid_; }

  /// Each rank writes its pid here before it executes its program (see enrol), so that no moment
  /// is left in which it could start others unseen.
  int fd() const { return pipe_.get(); }

  /// The groups enrolled so far have been ended; their numbers may belong to others soon.
  void forget_groups();

 private:
  Descriptor pipe_;  // its end, by close or by death of the launcher, is the watcher's signal
  pid_t pid_ = -1;
};

/// In a forked child: hands the calling process, the leader of its group, to the watcher.
void enrol(int watcher_fd) noexcept;

namespace {

constexpr pid_t kForget = 0;  // in the pipe: every other number is a group to remember

/// Becomes a process that nothing but its pipe reaches.
int stand_aside(int pipe) {
  ::setsid();
  ::prctl(PR_SET_NAME, "tessera-watch");
  const int null = ::open("/dev/null", O_RDWR);
  if (pipe <= STDERR_FILENO) pipe = ::fcntl(pipe, F_DUPFD, STDERR_FILENO + 1);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(null, fd);
  // Whoever waits for an inherited descriptor to close must not wait for the watcher.
  if (pipe > STDERR_FILENO + 1)
    ::close_range(STDERR_FILENO + 1, static_cast<unsigned>(pipe) - 1, 0);
  ::close_range(static_cast<unsigned>(pipe) + 1, ~0u, 0);
  return pipe;
}

[[noreturn]] void watch(int pipe) {
  pipe = stand_aside(pipe);
  std::vector<pid_t> groups;
  pid_t group;
  // Writes of this size arrive whole, never in pieces or mixed.
  while (::read(pipe, &group, sizeof(group)) == sizeof(group)) {
    group == kForget ? groups.clear() : groups.push_back(group);
  }
  for (const pid_t each : groups) ::kill(-each, SIGKILL);
  ::_exit(0);
}

}  // namespace

Watcher::Watcher() {
  int ends[2];
  checked(::pipe2(ends, O_CLOEXEC), "cannot make a pipe");
  Descriptor reading(ends[0]);
  pipe_.reset(ends[1]);
  pid_ = checked(::fork(), "cannot start the watcher process");
  if (pid_ == 0) {
    pipe_.reset();
    watch(reading.get());
  }
}

Watcher::~Watcher() {
  pipe_.reset();
  ::waitpid(pid_, nullptr, 0);
}

void Watcher::forget_groups() {
  // A watcher that somebody killed is no reason to fail: the job is not in danger by that.
  [[maybe_unused]] const auto ignored = ::write(pipe_.get(), &kForget, sizeof(kForget));
}

void enrol(int watcher_fd) noexcept {
  const pid_t self = ::getpid();
  [[maybe_unused]] const auto ignored = ::write(watcher_fd, &self, sizeof(self));
}

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
