#include "comm/peer_process.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>

namespace tessera::comm {
namespace {

int open_pidfd(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  return static_cast<int>(syscall(434, pid, 0));
#endif
}

}  // namespace

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

bool PeerProcess::has_exited() const {
  if (pid_ == getpid()) return false;
  // No pidfd: the process was gone when we looked, or the kernel has none (before 5.3); ask by
  // number then.
  if (descriptor_ < 0) return kill(pid_, 0) != 0 && errno == ESRCH;
  pollfd entry{.fd = descriptor_, .events = POLLIN, .revents = 0};
  return poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0;
}

}  // namespace tessera::comm
