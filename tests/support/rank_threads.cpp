#include "comm/context.h"
#include "support/rank_run.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

namespace tessera::testing {

namespace {

/// c10d finds groups by name: thread ranks have the same names for different groups.
class RegistryPerThread {
 public:
  RegistryPerThread() { c10d::set_thread_isolation_mode(true); }
  ~RegistryPerThread() { c10d::set_thread_isolation_mode(false); }
  RegistryPerThread(const RegistryPerThread&) = delete;
  RegistryPerThread& operator=(const RegistryPerThread&) = delete;
};

/// Which ranks still run.
class Roll {
 public:
  explicit Roll(int n) {
    for (int rank = 0; rank < n; ++rank) running_.insert(rank);
  }

  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    running_.erase(rank);
    changed_.notify_all();
  }

  /// The ranks that still run after `timeout`.
  std::set<int> wait(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [&] { return running_.empty(); });
    return running_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<int> running_;
};

/// Threads can't be killed, and their stacks refer to ours: a run over its deadline has to take the
/// process along.
[[noreturn]] void abort_run(const std::set<int>& running, const TemporaryFolder& folder) {
  std::cerr << "run_threads: past the deadline these ranks still run:";
  for (const int rank : running) std::cerr << " " << rank;
  std::cerr << "; aborting the test process" << std::endl;
  std::error_code ignored;
  std::filesystem::remove_all(folder.path(), ignored);
  std::abort();
}

void run_as_rank(const RankRun& run, const RankBody& body, const RankOptions& options) {
  SCOPED_TRACE("rank " + std::to_string(*run.init_options.rank) + " of " +
               std::to_string(*run.init_options.world_size) + " (thread)");
  at::set_num_threads(1);
  const ThreadRunScope run_scope(run);
  const comm::ContextScope context_scope;
  run_body(body, options);
}

}  // namespace

void run_threads(int n, const RankBody& body, RankOptions options) {
  const TemporaryFolder folder;
  const RegistryPerThread registry;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  at::manual_seed(options.seed);
  Roll roll(n);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    RankRun run{.init_options = rank_identity(rank, n, options),
                .folder = folder.path(),
                .device = options.device};
    run.init_options.store = store;
    run.init_options.dump_signal = 0;  // the handler belongs to a process
    threads.emplace_back([&roll, &body, &options, rank, run = std::move(run)] {
      run_as_rank(run, body, options);
      roll.leave(rank);
    });
  }
  if (const std::set<int> running = roll.wait(options.deadline); !running.empty()) {
    abort_run(running, folder);
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tessera::testing
