#include <tessera/serialize.h>

#include "base/error_text.h"
#include "comm/context.h"
#include "state/save_job.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

namespace tessera {

/// A thread that writes, and what came of it.
class PendingSave::Impl {
 public:
  Impl(std::string dir, std::function<void()> work)
      : dir_(std::move(dir)), thread_([this, work = std::move(work)]() mutable {
          try {
            work();
          } catch (...) {
            error_ = std::current_exception();
          }
          work = nullptr;  // returns its memory
          is_done_ = true;
        }) {}
  ~Impl() { join(); }

  void join() {
    const std::lock_guard lock(mutex_);
    if (thread_.joinable()) thread_.join();
  }
  /// Waits; the error, once.
  std::exception_ptr take_error() {
    join();
    const std::lock_guard lock(mutex_);
    return std::exchange(error_, nullptr);
  }
  /// Waits. An error that nobody has taken is told: the next save that would throw it may not come.
  void finish_unwatched() noexcept {
    try {
      join();
      {
        const std::lock_guard lock(mutex_);
        if (!error_ || std::exchange(is_told_, true)) return;
      }
      TORCH_WARN("save_async: the save to ", dir_,
                 " failed, and nobody called wait(): ", text_of(error_));
    } catch (...) {  // of who handles warnings
    }
  }
  bool is_done() const { return is_done_; }
  const std::string& dir() const { return dir_; }

 private:
  std::string dir_;
  std::mutex mutex_;
  std::exception_ptr error_;
  bool is_told_ = false;
  std::atomic<bool> is_done_{false};
  std::thread thread_;
};

namespace {

using comm::Context;

/// The last asynchronous save of each rank of this process, so that its next one can wait for it.
class LastSaves {
 public:
  std::shared_ptr<PendingSave::Impl> take(const std::shared_ptr<Context>& rank) {
    const std::lock_guard lock(mutex_);
    const auto found = saves_.find(rank.get());
    if (found == saves_.end()) return nullptr;
    // An address may come back with another context.
    const bool is_own = rank == nullptr || found->second.rank.lock() == rank;
    auto save = is_own ? found->second.save : nullptr;
    saves_.erase(found);
    return save;
  }
  void put(const std::shared_ptr<Context>& rank, std::shared_ptr<PendingSave::Impl> save) {
    const std::lock_guard lock(mutex_);
    saves_.insert_or_assign(rank.get(), Entry{rank, std::move(save)});
  }

 private:
  struct Entry {
    std::weak_ptr<Context> rank;
    std::shared_ptr<PendingSave::Impl> save;
  };
  std::mutex mutex_;
  std::map<const Context*, Entry> saves_;
};

LastSaves& last_saves() {
  static auto& saves = *new LastSaves();  // threads may outlive static objects
  return saves;
}

/// Whether bytes of the host travel without the device.
bool serves_host(const Group& group) {
  const auto served = group->getDeviceTypes();
  return std::ranges::find(served, c10::Device(c10::kCPU)) != served.end();
}

/// Groups in which threads meet that write: collectives of the group itself belong to training.
class WritingGroups {
 public:
  Group of(const Group& group) {
    if (!group || group->getSize() == 1) return group;
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(groups_, [](const auto& entry) { return entry.second.of.expired(); });
      const auto found = groups_.find(group.get());
      if (found != groups_.end()) return found->second.writing;
    }
    // Bytes of the host are told: beside training, and not on the device.
    auto writing = new_group(
        ranks(group),
        {.backend = serves_host(group) ? std::nullopt : std::optional<BackendOption>(Backend::Auto),
         .description = "save_async"});
    const std::lock_guard lock(mutex_);
    groups_.insert_or_assign(group.get(),
                             Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), writing});
    return writing;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> of;
    Group writing;
  };
  std::mutex mutex_;
  std::map<const c10d::ProcessGroup*, Entry> groups_;
};

WritingGroups& writing_groups() {
  static auto& groups = *new WritingGroups();
  return groups;
}

/// Waits for the rank's save that is still pending; throws if it failed and nobody has been told.
void finish_last(const std::string& function) {
  const auto last = last_saves().take(comm::current_context());
  const auto error = last ? last->take_error() : nullptr;
  if (!error) return;
  TORCH_CHECK(false, function, ": nothing was saved, since an earlier save_async to ", last->dir(),
              " failed and nobody waited for it: ", text_of(error),
              "; keep the PendingSave and call wait(), and save again");
}

/// Where ranks tell each other what they save: by the device it would come after all that it has to
/// do. One group for both functions, so that ranks that call different ones learn of it.
SaveOptions meeting_on_host(SaveOptions options) {
  const auto group = state::CollectiveSection(options.group).group();
  if (group && !serves_host(group)) options.group = writing_groups().of(group);
  return options;
}

void save_now(const std::string& dir, const torch::nn::Module& module,
              const torch::optim::Optimizer* optimizer, const Extra& extra,
              const SaveOptions& options) {
  finish_last("save");
  state::SaveJob("save", dir, module, optimizer, extra, meeting_on_host(options)).write();
}

PendingSave start_save(const std::string& dir, const torch::nn::Module& module,
                       const torch::optim::Optimizer* optimizer, const Extra& extra,
                       const SaveOptions& options) {
  finish_last("save_async");
  auto job = std::make_shared<state::SaveJob>("save_async", dir, module, optimizer, extra,
                                              meeting_on_host(options));
  job->copy_to_host();
  job->meet_in(writing_groups().of(state::CollectiveSection(options.group).group()));
  const auto rank = comm::current_context();
  auto save = std::make_shared<PendingSave::Impl>(dir, [job = std::move(job), rank]() mutable {
    const comm::ContextScope scope(rank);
    job->write();
  });
  last_saves().put(rank, save);
  return PendingSave(std::move(save));
}

}  // namespace

PendingSave& PendingSave::operator=(PendingSave&& other) noexcept {
  if (impl_) impl_->finish_unwatched();
  impl_ = std::move(other.impl_);
  return *this;
}

PendingSave::~PendingSave() {
  if (impl_) impl_->finish_unwatched();
}

void PendingSave::wait() {
  if (!impl_) return;
  if (const auto error = impl_->take_error()) std::rethrow_exception(error);
}

bool PendingSave::is_done() const { return !impl_ || impl_->is_done(); }

void save(const std::string& dir, nn::ModuleRef module, const Extra& extra, SaveOptions options) {
  save_now(dir, *module, nullptr, extra, options);
}

void save(const std::string& dir, nn::ModuleRef module, const torch::optim::Optimizer& optimizer,
          const Extra& extra, SaveOptions options) {
  save_now(dir, *module, &optimizer, extra, options);
}

PendingSave save_async(const std::string& dir, nn::ModuleRef module, const Extra& extra,
                       SaveOptions options) {
  return start_save(dir, *module, nullptr, extra, options);
}

PendingSave save_async(const std::string& dir, nn::ModuleRef module,
                       const torch::optim::Optimizer& optimizer, const Extra& extra,
                       SaveOptions options) {
  return start_save(dir, *module, &optimizer, extra, options);
}

}  // namespace tessera
