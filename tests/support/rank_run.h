#pragma once

#include <tessera/comm.h>

#include "support/ranks.h"

#include <filesystem>
#include <optional>

/// What the parts of the rank harness share; tests include ranks.h.
namespace tessera::testing {

/// The run a body belongs to.
struct RankRun {
  InitOptions init_options;
  std::filesystem::path folder;  // of this run, seen by all its ranks: store, logs, beacons
};

/// What a rank joins the world with, apart from the store.
InitOptions rank_identity(int rank, int world_size, const RankOptions& options);

/// The calling thread's run, else the process's (of a process rank); throws outside of a body.
const RankRun& current_run();
void set_process_run(const RankRun* run);

class ThreadRunScope {
 public:
  explicit ThreadRunScope(const RankRun& run);
  ~ThreadRunScope();
  ThreadRunScope(const ThreadRunScope&) = delete;
  ThreadRunScope& operator=(const ThreadRunScope&) = delete;
};

/// Joins the world of the current run, runs the body, leaves. Whatever is thrown becomes a failure
/// of the test.
void run_body(const RankBody& body, const RankOptions& options);

/// Set if this process is a rank: which of the test's runs it belongs to, and where.
struct ChildIdentity {
  int rank;
  int world_size;
  int call;
  std::filesystem::path folder;
};
const std::optional<ChildIdentity>& child_identity();

/// Runs are counted within a test; main calls this at the start of each.
void reset_run_count();

inline constexpr int kExitFailed = 1;
inline constexpr int kExitSkipped = 77;
inline constexpr int kExitNotReached =
    78;  // the test ended before the run this process is a rank of

}  // namespace tessera::testing
