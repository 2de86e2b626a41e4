#include "comm/peer_process.h"

#include "base/text.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace tessera::comm {

namespace {

std::string own_namespace(const char* kind) {
  std::error_code error;
  const auto name = std::filesystem::read_symlink(std::string("/proc/self/ns/") + kind, error);
  return error ? "unknown" : name.string();
}

}  // namespace

std::string host_identity() {
  std::string boot = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot + "/" + own_namespace("pid") + "/user:" + std::to_string(getuid());
}

std::string network_identity() { return own_namespace("net"); }

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown host";
}

namespace {

int open_pidfd(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  return static_cast<int>(syscall(434, pid, 0));
#endif
}

constexpr std::chrono::seconds kLook{1};
// A debugger may stop a process for a moment.
constexpr std::chrono::milliseconds kToldAfter{1500};

std::atomic<std::chrono::milliseconds> stopped_timeout{std::chrono::seconds(30)};

bool is_stopped(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line, '\0');
  // "pid (name) state …"; the name may hold anything.
  const auto name_end = line.rfind(") ");
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return false;
  const char state = line[name_end + 2];
  return state == 'T' || state == 't';
}

}  // namespace

void set_stopped_timeout(std::chrono::milliseconds timeout) { stopped_timeout = timeout; }

bool is_of_another_user(int pid) {
  if (pid == getpid()) return false;
  // The owner of /proc/<pid> is root where a process must not be dumped; its status tells the user.
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  for (std::string word; file >> word;) {
    uid_t real = 0, effective = 0;
    if (word == "Uid:" && file >> real >> effective) return effective != geteuid();
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return false;
}

std::shared_ptr<PeerProcess> PeerProcess::watch(int pid) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<PeerProcess>> known;
  const std::lock_guard lock(mutex);
  auto& slot = known[pid];
  auto peer = slot.lock();
  if (!peer || peer->has_exited()) {  // exited: the number now belongs to another process
    peer = std::shared_ptr<PeerProcess>(new PeerProcess(pid));
    slot = peer;
  }
  return peer;
}

PeerProcess::PeerProcess(int pid)
    : pid_(pid), descriptor_(pid == getpid() ? -1 : open_pidfd(pid)) {}

PeerProcess::~PeerProcess() {
  if (descriptor_ >= 0) close(descriptor_);
}

std::optional<std::chrono::milliseconds> PeerProcess::stopped_for() const {
  using Clock = std::chrono::steady_clock;
  if (pid_ == getpid()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  if (now - last_look_ >= kLook) {
    // Nobody has looked meanwhile: two short stops are not one long one.
    if (now - last_look_ > 3 * kLook) stopped_since_.reset();
    last_look_ = now;
    if (!is_stopped(pid_) || has_exited()) {
      stopped_since_.reset();
      is_told_ = false;
    } else if (!stopped_since_) {
      stopped_since_ = now;
    }
  }
  if (!stopped_since_) return std::nullopt;
  return std::chrono::duration_cast<std::chrono::milliseconds>(now - *stopped_since_);
}

std::optional<std::string> PeerProcess::find_stop(const std::string& name,
                                                  const std::string& waiting) const {
  const auto time = stopped_for();
  if (!time) return std::nullopt;
  const auto who = name + " (process " + std::to_string(pid_) + ")";
  if (*time > kToldAfter && !waiting.empty() && claim_telling()) {
    std::cerr << "tessera: " + who + " is stopped (SIGSTOP or a debugger); " + waiting +
                     " waits for it\n"
              << std::flush;
  }
  const auto limit = stopped_timeout.load();
  if (limit.count() <= 0 || *time < limit) return std::nullopt;
  return who + " has been stopped for " + format_seconds(static_cast<double>(time->count()) / 1e3) +
         " (SIGSTOP or a debugger); continue it with kill -CONT " + std::to_string(pid_) +
         ", or set a longer --stopped-timeout";
}

bool PeerProcess::claim_telling() const {
  const std::lock_guard lock(mutex_);
  return stopped_since_ && !std::exchange(is_told_, true);
}

bool PeerProcess::has_exited() const {
  if (pid_ == getpid()) return false;
  // No pidfd: the process was gone when we looked, or the kernel has none (before 5.3); ask by
  // number then.
  if (descriptor_ < 0) return kill(pid_, 0) != 0 && errno == ESRCH;
  pollfd entry{.fd = descriptor_, .events = POLLIN, .revents = 0};
  return poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0;
}

}  // namespace tessera::comm
