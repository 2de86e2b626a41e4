#include "tools/launched_tool.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <utmp.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace tessera::test {
namespace {

using launcher::checked;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kTimeLimit{60};

/// Polls until `deadline`; false if nothing happened.
bool poll_until(std::vector<pollfd>& fds, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return ::poll(fds.data(), fds.size(), static_cast<int>(std::max<long>(0, left.count()))) > 0;
}

bool becomes_ready(int fd) {
  std::vector<pollfd> fds{{fd, POLLIN, 0}};
  return poll_until(fds, Clock::now() + kTimeLimit);
}

Descriptor open_pidfd(pid_t pid) {
  return Descriptor(checked(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)), "pidfd_open"));
}

/// Appends what can be read to `text`; closes `fd` at the end of the stream.
void read_more(Descriptor& fd, std::string& text) {
  char buffer[1 << 16];
  const ssize_t size = ::read(fd.get(), buffer, sizeof(buffer));
  if (size > 0) {
    text.append(buffer, static_cast<std::size_t>(size));
  } else if (size == 0 || errno != EINTR) {
    fd.reset();  // EIO: the last process has left the terminal
  }
}

std::optional<std::string> find_line(const std::string& text, const std::string& start) {
  std::size_t at = text.starts_with(start) ? 0 : text.find("\n" + start);
  if (at == std::string::npos) return std::nullopt;
  at += text[at] == '\n' && !text.starts_with(start) ? 1 + start.size() : start.size();
  const auto end = text.find('\n', at);
  if (end == std::string::npos) return std::nullopt;
  return text.substr(at, end - at);
}

}  // namespace

WatchedProcess::WatchedProcess(pid_t pid) : pid_(pid), pidfd_(open_pidfd(pid)) {}

bool WatchedProcess::has_ended() const {
  pollfd fd{pidfd_.get(), POLLIN, 0};
  return ::poll(&fd, 1, 0) == 1;
}

bool WatchedProcess::ends() const { return becomes_ready(pidfd_.get()); }

Fifo::Fifo(const std::string& name)
    : path_(std::filesystem::temp_directory_path() /
            ("tessera_" + name + std::to_string(::getpid()))) {
  checked(::mkfifo(path_.c_str(), 0600), "mkfifo");
  fd_.reset(checked(::open(path_.c_str(), O_RDWR | O_CLOEXEC), "open"));
}

Fifo::~Fifo() { ::unlink(path_.c_str()); }

void Fifo::write_line() const { checked(static_cast<int>(::write(fd_.get(), "go\n", 3)), "write"); }

std::string Fifo::read_line() const {
  std::string line;
  for (char byte = 0; becomes_ready(fd_.get()) && ::read(fd_.get(), &byte, 1) == 1;) {
    if (byte == '\n') return line;
    line.push_back(byte);
  }
  throw std::runtime_error("no line came through " + path_);
}

std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "stat");
    std::string line;
    if (!std::getline(file, line)) continue;
    const auto name_end = line.rfind(") ");
    if (name_end == std::string::npos) continue;
    if (std::stoi(line.substr(name_end + 4)) == parent) found.push_back(std::stoi(line));
  }
  return found;
}

LaunchedTool::LaunchedTool(const ToolOptions& options) {
  int in[2];
  int out[2];
  int err[2];
  if (options.has_terminal) {
    checked(::openpty(&out[0], &out[1], nullptr, nullptr, nullptr), "openpty");
    in[0] = err[1] = out[1];
  } else {
    checked(::pipe2(in, O_CLOEXEC), "pipe2");
    checked(::pipe2(out, O_CLOEXEC), "pipe2");
    checked(::pipe2(err, O_CLOEXEC), "pipe2");
    err_.reset(err[0]);
  }
  out_.reset(out[0]);
  pid_ = checked(::fork(), "fork");
  if (pid_ == 0) become_tool(options, in[0], out[1], options.has_one_pipe ? out[1] : err[1]);
  ::close(out[1]);
  if (options.has_terminal) return;
  ::close(err[1]);
  ::close(in[0]);
  const Descriptor writing(in[1]);
  if (::write(in[1], options.input.data(), options.input.size()) < 0) give_up("took no input");
}

void LaunchedTool::become_tool(const ToolOptions& options, int in, int out, int err) const {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) std::signal(number, SIG_DFL);
  if (options.has_terminal) {
    ::close(out_.get());
    ::login_tty(out);
  } else {
    ::dup2(in, STDIN_FILENO);
    ::dup2(out, STDOUT_FILENO);
    ::dup2(err, STDERR_FILENO);
  }
  for (const char* name : {"NO_COLOR", "OMP_NUM_THREADS"}) ::unsetenv(name);
  ::setenv("TERM", "xterm", 1);
  for (const auto& setting : options.environment) {
    const auto equals = setting.find('=');
    if (equals == std::string::npos) {
      ::unsetenv(setting.c_str());
    } else {
      ::setenv(setting.substr(0, equals).c_str(), setting.substr(equals + 1).c_str(), 1);
    }
  }
  std::vector<char*> argv{const_cast<char*>("tessera")};
  for (const auto& word : options.arguments) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  ::execv(TESSERA_TOOL, argv.data());
  ::_exit(99);
}

LaunchedTool::~LaunchedTool() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void LaunchedTool::signal(int number) const { checked(::kill(pid_, number), "kill"); }

void LaunchedTool::type(const std::string& keys) const {
  if (::write(out_.get(), keys.data(), keys.size()) < 0) give_up("took no keys");
}

std::string LaunchedTool::rest_of_out_line(const std::string& start) {
  std::optional<std::string> rest;
  read_until([&] { return (rest = find_line(out_text_, start)).has_value(); }, true);
  if (!rest) give_up("did not write '" + start + "…' to stdout");
  return *rest;
}

std::string LaunchedTool::rest_of_err_line(const std::string& start) {
  std::optional<std::string> rest;
  read_until([&] { return (rest = find_line(err_text_, start)).has_value(); }, false);
  if (!rest) give_up("did not write '" + start + "…' to stderr");
  return *rest;
}

void LaunchedTool::read_until(const std::function<bool()>& is_enough, bool also_out) {
  const auto deadline = Clock::now() + kTimeLimit;
  while (!is_enough() && ((also_out && out_.is_open()) || err_.is_open())) {
    std::vector<pollfd> fds{{also_out ? out_.get() : -1, POLLIN, 0}, {err_.get(), POLLIN, 0}};
    if (!poll_until(fds, deadline)) give_up("went on for too long");
    if (fds[0].revents != 0) read_more(out_, out_text_);
    if (fds[1].revents != 0) read_more(err_, err_text_);
  }
}

void LaunchedTool::wait_until_stopped() const {
  siginfo_t siginfo{};
  checked(::waitid(P_PID, static_cast<id_t>(pid_), &siginfo, WSTOPPED | WEXITED | WNOWAIT),
          "waitid");
  if (siginfo.si_code != CLD_STOPPED) give_up("ended instead of stopping");
}

ToolResult LaunchedTool::wait() {
  read_until([] { return false; }, true);
  if (!becomes_ready(open_pidfd(pid_).get())) give_up("closed its output but did not end");
  int status = 0;
  ::waitpid(std::exchange(pid_, -1), &status, 0);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return {code, std::move(out_text_), std::move(err_text_)};
}

void LaunchedTool::give_up(const std::string& what) const {
  throw std::runtime_error("tessera " + what + "\n-- stdout:\n" + out_text_.substr(0, 4000) +
                           "\n-- stderr:\n" + err_text_.substr(0, 4000));
}

ToolResult run_tool(const ToolOptions& options) { return LaunchedTool(options).wait(); }

std::vector<std::string> shell_ranks(std::vector<std::string> options, const std::string& script) {
  options.insert(options.begin(), "run");
  for (const auto& word : {std::string("--"), std::string("/bin/sh"), std::string("-c"), script}) {
    options.push_back(word);
  }
  return options;
}

std::vector<std::string> probe_ranks(std::vector<std::string> options,
                                     const std::vector<std::string>& words) {
  options.insert(options.begin(), "run");
  options.insert(options.end(), {"--", TESSERA_RANK_PROBE});
  options.insert(options.end(), words.begin(), words.end());
  return options;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> sorted_lines(const std::string& text) {
  auto lines = lines_of(text);
  std::ranges::sort(lines);
  return lines;
}

}  // namespace tessera::test
