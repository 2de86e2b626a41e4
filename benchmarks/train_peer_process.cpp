#include "train_peer_job.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace tessera::benchmarks {
namespace {

constexpr off_t kLastWords = 3000;  // bytes

std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& added) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!added.contains(text.substr(0, text.find('=')))) result.push_back(text);
  }
  for (const auto& [name, value] : added) result.push_back(name + "=" + value);
  return result;
}

/// Between fork and exec: system calls only, for another thread's locks would never open again.
[[noreturn]] void become(char* const* arguments, char* const* environment, int channel, int log,
                         pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // it died before the line above took effect
  dup2(channel, STDIN_FILENO);
  dup2(channel, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  execve(arguments[0], arguments, environment);
  _exit(127);
}

int checked(int result, const char* what) {
  TORCH_CHECK(result >= 0, "bench train: cannot ", what, " for a peer: ", std::strerror(errno));
  return result;
}

}  // namespace

PeerProcess::PeerProcess(const std::vector<std::string>& arguments,
                         const std::map<std::string, std::string>& environment) {
  auto words = arguments;
  auto settings = merged_environment(environment);
  const auto word_pointers = pointers_to(words);
  const auto setting_pointers = pointers_to(settings);
  // A socket rather than pipes: writing to a process that has ended is then no SIGPIPE.
  int ends[2];
  checked(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), "make a socket");
  channel_ = ends[0];
  log_ = checked(memfd_create("tessera-bench-peer-log", MFD_CLOEXEC), "make a memory file");
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) become(word_pointers.data(), setting_pointers.data(), ends[1], log_, parent);
  const int error = errno;
  close(ends[1]);
  if (pid_ > 0) return;
  close(channel_);
  close(log_);
  errno = error;
  checked(-1, "start a process");
}

PeerProcess::PeerProcess(PeerProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      channel_(std::exchange(other.channel_, -1)),
      log_(std::exchange(other.log_, -1)),
      status_(other.status_),
      ended_(other.ended_),
      arrived_(std::move(other.arrived_)) {}

PeerProcess::~PeerProcess() {
  end();
  if (channel_ >= 0) close(channel_);
  if (log_ >= 0) close(log_);
}

std::string PeerProcess::end() {
  if (pid_ > 0 && !ended_) {
    // One that ended by itself keeps its own status: the signal finds a zombie.
    kill(pid_, SIGKILL);
    while (waitpid(pid_, &status_, 0) < 0 && errno == EINTR) {
    }
    ended_ = true;
  }
  return WIFSIGNALED(status_) ? "signal " + std::to_string(WTERMSIG(status_))
                              : "exit code " + std::to_string(WEXITSTATUS(status_));
}

bool PeerProcess::send(const std::string& line) const {
  const std::string text = line + "\n";  // far smaller than the socket's buffer
  return ::send(channel_, text.data(), text.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(text.size());
}

PeerProcess::Received PeerProcess::receive(std::string& line) {
  if (take_line(line)) return Received::Line;  // came with the one before it
  char bytes[1 << 16];
  const auto count = recv(channel_, bytes, sizeof(bytes), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return Received::Nothing;
  if (count <= 0) return Received::End;
  arrived_.append(bytes, static_cast<size_t>(count));
  return take_line(line) ? Received::Line : Received::Nothing;
}

bool PeerProcess::take_line(std::string& line) {
  const auto end = arrived_.find('\n');
  if (end == std::string::npos) return false;
  line = arrived_.substr(0, end);
  arrived_.erase(0, end + 1);
  return true;
}

std::string PeerProcess::last_words() const {
  const off_t size = lseek(log_, 0, SEEK_END);
  const off_t begin = std::max<off_t>(size - kLastWords, 0);
  std::string words(static_cast<size_t>(size - begin), '\0');
  const auto count = pread(log_, words.data(), words.size(), begin);
  words.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
  return words;
}

}  // namespace tessera::benchmarks
