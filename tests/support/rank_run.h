#pragma once

#include <tessera/comm.h>

#include "support/ranks.h"

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// What the parts of the rank harness share; tests include ranks.h.
namespace tessera::testing {

/// The run a body belongs to.
struct RankRun {
  InitOptions init_options;
  std::filesystem::path folder;  // of this run, seen by all its ranks: store, logs, beacons
  c10::DeviceType device = c10::DeviceType::CPU;
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

/// Makes run_device() the calling thread's current device.
void use_run_device();
/// What NCCL needs for several ranks on one GPU: it takes ranks of one host for ranks with a device
/// each.
std::map<std::string, std::string> shared_gpu_environment(int rank, int n,
                                                          const RankOptions& options);

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
/// Ranks that are used again belong to one run after the other.
void set_child_identity(ChildIdentity identity);

/// The test ended before the run that this process is a rank of: says so. kExitNotReached.
int say_not_reached();

/// Added to the parent's environment for a rank; no value: removed from it.
using RankEnvironment = std::map<std::string, std::optional<std::string>>;
RankEnvironment rank_environment(const RankOptions& options, int rank, int n);
/// The command that a rank is started by, for runs of this test.
std::vector<std::string> rank_arguments(const std::string& test);

/// How a rank ended.
struct RankEnd {
  std::optional<ExitStatus> status;
  bool may_die = false;
  bool killed_by_harness = false;
  std::string output = {};

  /// Ended in a way that the test did not allow.
  bool failed() const;
};
/// Failures become the calling test's; it is skipped if a rank was.
void report_ends(const std::vector<RankEnd>& ends);

/// Runs are counted within a test; main calls this at the start of each.
void reset_run_count();

/// What the others get once a rank has failed: enough for a report of their own, too little to wait
/// out timeouts.
inline constexpr std::chrono::seconds kGraceAfterFailure{10};

inline constexpr int kExitFailed = 1;
inline constexpr int kExitSkipped = 77;
inline constexpr int kExitNotReached =
    78;  // the test ended before the run this process is a rank of

}  // namespace tessera::testing
