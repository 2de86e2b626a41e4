#include "comm/gloo/watchdog.h"

#include "comm/heartbeat.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>

namespace tessera::comm::gloo {
namespace {

// What takes less needs no explanation.
constexpr std::chrono::seconds kLook{1};

}  // namespace

Watchdog::Watchdog(const BackendRequest& request, std::shared_ptr<GroupLog> log,
                   std::function<void()> give_up)
    : rank_(request.rank),
      processes_(request.processes),
      world_ranks_(request.world_ranks),
      heartbeat_(request.heartbeat),
      log_(std::move(log)),
      give_up_(std::move(give_up)) {
  const bool sees_any = heartbeat_ || std::ranges::any_of(processes_, [](const auto& process) {
                          return process && process->pid() != getpid();
                        });
  if (sees_any) thread_ = std::thread([this] { run(); });
}

void Watchdog::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  closing_.notify_all();
  // Giving up completes futures, and a callback of one may end the group.
  if (thread_.get_id() == std::this_thread::get_id()) return thread_.detach();
  if (thread_.joinable()) thread_.join();
  heartbeat_.reset();  // a group that is kept longer than the world must not keep it going
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!closing_.wait_for(lock, kLook, [&] { return closed_; })) {
    lock.unlock();
    const auto since = log_->waits_since();
    const bool is_slow = since && Clock::now() - *since >= kLook;
    if (const auto problem = is_slow ? find_problem() : std::nullopt) {
      log_->blame(*problem);
      const auto give_up = give_up_;
      return give_up();  // after which this may be gone
    }
    log_->tell_late();
    lock.lock();
  }
}

std::optional<std::string> Watchdog::find_problem() const {
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    const bool is_teller = rank_ == (rank == 0 ? 1 : 0);  // one is enough
    const auto waiting = is_teller ? c10::str("rank ", rank_) : "";
    const auto problem = processes_[rank]
                             ? processes_[rank]->find_stop(c10::str("rank ", rank), waiting)
                             : std::nullopt;
    if (problem) return problem;
  }
  return heartbeat_ ? heartbeat_->find_lost(world_ranks_) : std::nullopt;
}

}  // namespace tessera::comm::gloo
