#include "launcher/rank_process.h"

#include "launcher/watcher.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstring>
#include <filesystem>
#include <fstream>

namespace tessera::launcher {
namespace {

struct Pipe {
  Descriptor reading;
  Descriptor writing;
};

Pipe make_pipe() {
  int ends[2];
  checked(::pipe2(ends, O_CLOEXEC), "cannot make a pipe for a rank");
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

/// The null-terminated array that exec wants; valid as long as `words`.
std::vector<char*> pointers_to(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (const auto& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

StartError start_error(const std::string& program, int error) {
  const std::string quoted = "'" + program + "'";
  std::error_code ignored;
  if (error == ENOENT && !std::filesystem::exists(program, ignored)) {
    const bool is_path = program.find('/') != std::string::npos;
    return {
        "program " + quoted + " not found; " +
            (is_path ? "check the path" : "give its path (./" + program + ") or a name on PATH"),
        127};
  }
  if (error == ENOENT && program.find('/') == std::string::npos) {
    return {"program " + quoted + " not found on PATH; for the file of that name here write ./" +
                program,
            127};
  }
  if (error == ENOENT) {
    return {"program " + quoted + " needs an interpreter that does not exist; check its first line",
            126};
  }
  if (error == EACCES && std::filesystem::is_directory(program, ignored)) {
    return {"program " + quoted + " is a directory; name the program in it", 126};
  }
  if (error == EACCES) {
    return {"program " + quoted + " is not executable; allow it with chmod +x", 126};
  }
  return {"program " + quoted + " cannot be executed: " + std::strerror(error), 126};
}

struct ChildSide {
  pid_t launcher;
  char* const* argv;
  char** environment;
  int stdin_fd;
  int stdout_fd;
  int stderr_fd;
  int error_fd;  // closed by a successful exec; else gets errno
};

/// Between fork and exec: system calls only, for another thread's locks would never open again.
[[noreturn]] void become_rank(const ChildSide& side, const RankStart& start) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != side.launcher) ::_exit(127);  // it died before the line above took effect
  ::setpgid(0, 0);
  enrol(start.watcher_fd);
  ::dup2(side.stdin_fd, STDIN_FILENO);
  ::dup2(side.stdout_fd, STDOUT_FILENO);
  ::dup2(side.stderr_fd, STDERR_FILENO);
  if (start.kept_fd >= 0) ::fcntl(start.kept_fd, F_SETFD, 0);
  start.signals.restore();
  ::environ = side.environment;  // a PATH among the settings counts for the search, too
  ::execvp(side.argv[0], side.argv);
  const int error = errno;
  [[maybe_unused]] const auto ignored = ::write(side.error_fd, &error, sizeof(error));
  ::_exit(127);
}

}  // namespace

RankProcess start_rank(const RankStart& start) {
  Pipe out = make_pipe();
  Pipe err = make_pipe();
  Pipe exec = make_pipe();
  const auto argv = pointers_to(start.command);
  auto environment = pointers_to(start.environment);
  const ChildSide side{::getpid(),        argv.data(),       environment.data(), start.stdin_fd,
                       out.writing.get(), err.writing.get(), exec.writing.get()};

  RankProcess process;
  process.pid = checked(::fork(), "cannot start a rank");
  if (process.pid == 0) become_rank(side, start);

  exec.writing.reset();
  int error = 0;
  if (::read(exec.reading.get(), &error, sizeof(error)) == sizeof(error)) {
    ::waitpid(process.pid, nullptr, 0);
    throw start_error(start.command[0], error);
  }
  // glibc 2.36 declares pidfd_open for C only.
  const auto pidfd = static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0));
  process.pidfd.reset(checked(pidfd, "cannot watch a rank (pidfd_open)"));
  process.out = std::move(out.reading);
  process.err = std::move(err.reading);
  return process;
}

Stop stop_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line, '\0');
  // "pid (name) state …"; the name may hold anything.
  const auto name_end = line.rfind(") ");
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return Stop::None;
  const char state = line[name_end + 2];
  return state == 'T' ? Stop::BySignal : state == 't' ? Stop::ByDebugger : Stop::None;
}

RankEnd end_of(pid_t pid) {
  siginfo_t siginfo{};
  checked(::waitid(P_PID, static_cast<id_t>(pid), &siginfo, WEXITED | WNOWAIT), "waitid");
  if (siginfo.si_code == CLD_EXITED) return {.code = siginfo.si_status};
  return {.code = 128 + siginfo.si_status, .signal = siginfo.si_status};
}

}  // namespace tessera::launcher
