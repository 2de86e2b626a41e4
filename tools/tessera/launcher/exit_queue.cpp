#include "launcher/exit_queue.h"

#include <sys/epoll.h>

namespace tessera::launcher {

ExitQueue::ExitQueue() : epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")) {}

void ExitQueue::add(int pidfd, int rank) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = entries_.size();
  entries_.push_back({pidfd, rank});
  checked(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, pidfd, &event), "epoll_ctl");
}

std::vector<int> ExitQueue::take() {
  std::vector<int> ranks;
  if (entries_.empty()) return ranks;
  // poll() would report a set; epoll queues what becomes ready in the order in which it does.
  std::vector<epoll_event> events(entries_.size());
  const int count =
      ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), /*timeout=*/0);
  for (int i = 0; i < count; ++i) {
    const Entry& entry = entries_[events[static_cast<std::size_t>(i)].data.u64];
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, entry.pidfd, nullptr);
    ranks.push_back(entry.rank);
  }
  return ranks;
}

}  // namespace tessera::launcher
