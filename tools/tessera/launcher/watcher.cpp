#include "launcher/watcher.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <vector>

namespace tessera::launcher {
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

}  // namespace tessera::launcher
