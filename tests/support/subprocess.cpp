#include "support/subprocess.h"

#include "support/temporary_folder.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>
#include <utility>

namespace tessera::testing {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

std::vector<std::string> merged_environment(const SubprocessOptions& options) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!options.environment.contains(text.substr(0, text.find('=')))) result.push_back(text);
  }
  for (const auto& [name, value] : options.environment) {
    if (value) result.push_back(name + "=" + *value);
  }
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

/// Between fork and exec only async-signal-safe calls are allowed: other threads may have held any
/// lock.
struct ChildStart {
  char** arguments;
  char** environment;
  const char* folder;
  int output;
  pid_t parent;
  bool own_process_group;

  [[noreturn]] void run() const {
    if (own_process_group) setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);  // the parent died before prctl took effect
    if (output >= 0) {
      dup2(output, STDOUT_FILENO);
      dup2(output, STDERR_FILENO);
    }
    if (*folder != '\0' && chdir(folder) != 0) fail("cannot enter ", folder);
    execvpe(arguments[0], arguments, environment);
    fail("cannot execute ", arguments[0]);
  }

  [[noreturn]] static void fail(const char* what, const char* name) {
    for (const char* text : {what, name, "\n"}) {
      [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, strlen(text));
    }
    _exit(127);
  }
};

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

std::string ExitStatus::text() const {
  std::ostringstream out;
  if (signal != 0) {
    out << "signal " << signal << " (" << strsignal(signal) << ")";
  } else {
    out << "exit code " << code;
  }
  return out.str();
}

Subprocess::Subprocess(SubprocessOptions options) : output_(std::move(options.output)) {
  std::vector<std::string> environment = merged_environment(options);
  std::vector<char*> environment_pointers = pointers(environment);
  std::vector<char*> argument_pointers = pointers(options.arguments);
  int output = -1;
  if (!output_.empty()) {
    output = open(output_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (output < 0)
      throw std::system_error(errno, std::generic_category(), "Subprocess: " + output_.string());
  }
  const ChildStart start{.arguments = argument_pointers.data(),
                         .environment = environment_pointers.data(),
                         .folder = options.folder.c_str(),
                         .output = output,
                         .parent = getpid(),
                         .own_process_group = options.own_process_group};
  pid_ = fork();
  if (pid_ == 0) start.run();
  const int fork_error = errno;
  if (output >= 0) close(output);
  if (pid_ < 0) throw std::system_error(fork_error, std::generic_category(), "Subprocess: fork");
  if (options.own_process_group) setpgid(pid_, pid_);  // in both, whoever comes first
  own_process_group_ = options.own_process_group;
  pid_descriptor_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
}

Subprocess::Subprocess(Subprocess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pid_descriptor_(std::exchange(other.pid_descriptor_, -1)),
      own_process_group_(other.own_process_group_),
      stopped_(other.stopped_),
      output_(std::move(other.output_)),
      status_(other.status_) {}

Subprocess::~Subprocess() {
  if (pid_ < 0) return;
  if (!status_) {
    if (own_process_group_) ::kill(-pid_, SIGKILL);
    ::kill(pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  if (pid_descriptor_ >= 0) close(pid_descriptor_);
}

void Subprocess::signal(int number) const {
  if (!status_) ::kill(pid_, number);
}

bool Subprocess::stop() {
  signal(SIGSTOP);
  return observe(WUNTRACED) && stopped_;
}

void Subprocess::resume() {
  signal(SIGCONT);
  stopped_ = false;
}

/// One waitpid; true if it told something. Afterwards stopped_ and status_ are up to date.
bool Subprocess::observe(int flags) {
  if (status_) return true;
  int status = 0;
  pid_t seen = -1;
  do {
    seen = waitpid(pid_, &status, flags);
  } while (seen < 0 && errno == EINTR);
  if (seen <= 0) return false;
  stopped_ = WIFSTOPPED(status);
  if (WIFSIGNALED(status)) status_ = ExitStatus{.code = 0, .signal = WTERMSIG(status)};
  if (WIFEXITED(status)) status_ = ExitStatus{.code = WEXITSTATUS(status), .signal = 0};
  return true;
}

bool wait_any(const std::vector<Subprocess*>& processes, steady_clock::time_point deadline) {
  while (true) {
    std::vector<pollfd> descriptors;
    bool pollable = true;
    for (Subprocess* process : processes) {
      if (process->observe(WNOHANG) && process->status_) return true;
      descriptors.push_back({.fd = process->pid_descriptor_, .events = POLLIN, .revents = 0});
      pollable = pollable && process->pid_descriptor_ >= 0;
    }
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) return processes.empty();
    // Kernels and sandboxes without pidfd_open: ask every 5 ms.
    const milliseconds turn = pollable ? left : std::min(left, milliseconds(5));
    poll(descriptors.data(), descriptors.size(),
         static_cast<int>(std::min<int64_t>(turn.count(), 1 << 30)));
  }
}

std::optional<ExitStatus> Subprocess::wait(milliseconds timeout) {
  wait_any({this}, steady_clock::now() + timeout);
  return status_;
}

std::string Subprocess::output() const { return read_file(output_); }

ProgramResult run_program(SubprocessOptions options, milliseconds timeout) {
  TemporaryFolder folder;
  if (options.output.empty()) options.output = folder.path() / "output";
  options.own_process_group = true;
  Subprocess process(std::move(options));
  ProgramResult result;
  if (!process.wait(timeout)) {
    result.timed_out = true;
    ::kill(-process.pid(), SIGKILL);
  }
  result.status = *process.wait(std::chrono::hours(1));
  result.output = process.output();
  return result;
}

}  // namespace tessera::testing
