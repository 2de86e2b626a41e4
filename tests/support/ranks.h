#pragma once

#include <tessera/comm.h>

#include "support/beacon.h"
#include "support/device_cases.h"
#include "support/rank_options.h"
#include "support/subprocess.h"

#include <c10/core/Device.h>

#include <chrono>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>

namespace tessera::comm {
class ContextScope;
}  // namespace tessera::comm

/// Ranks for tests: processes that can be killed, threads that sanitizers see, or a pretended world
/// in this thread.
namespace tessera::testing {

/// Runs `body` in n processes: this test binary again, with this test as its filter. What the test
/// does before this call is done by every rank too; what follows is done by the parent alone. Every
/// failure (gtest's, an exception, an exit, a signal) becomes one of the calling test with the
/// rank's output. GTEST_SKIP in a body skips the test. Once a rank has failed the others have ten
/// seconds to end. Several calls in a test are fine, nested ones are not.
///
/// With TESSERA_REUSE_RANKS=1 the processes stay for the next run of this test binary with as many
/// ranks and the same environment, as long as no rank fails: starting them with CUDA takes seconds.
/// Then the test is unwound in the ranks after the body, so TearDown runs there, too.
void run_processes(int n, const RankBody& body, RankOptions options = {});

/// Runs `body` in n threads of this process, each with its own context. The default random
/// generator is shared by the threads: build models before the call or inside seeded()
/// (twins.h). A run over its deadline aborts the process.
void run_threads(int n, const RankBody& body, RankOptions options = {});

enum class RankKind { Threads, Processes };

void run_ranks(RankKind kind, int n, const RankBody& body, RankOptions options = {});

/// "Threads" or "Processes", for names of TEST_P instances.
std::string to_string(RankKind kind);
void PrintTo(RankKind kind, std::ostream* out);  // NOLINT: gtest's name

/// What the harness joins the world with, inside a body: backend, rank, world size, store, timeout.
InitOptions rank_init_options();
/// This rank and the number of ranks of the run, before init as well.
int run_rank();
int run_world_size();
/// Where tensors of the current run live: CPU, or cuda:(rank % number of devices).
c10::Device run_device();

/// Ranks as processes whose parent acts while they run: kills, stops, releases them. One object is
/// one run, counted like a run_processes call. In a rank the constructor runs the body and never
/// returns; ranks of a later run in the same test pass by the object, whose members then do nothing
/// and claim success.
class RankProcesses {
 public:
  RankProcesses(int n, const RankBody& body, RankOptions options = {});
  ~RankProcesses();  // kills what still runs; joins nothing
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  pid_t pid(int rank) const;
  void signal(int rank, int number);  // SIGSTOP and SIGCONT as stop() and resume()
  void kill(int rank);                // SIGKILL, and reaps
  void stop(int rank);                // SIGSTOP; returns once it has stopped
  void resume(int rank);              // SIGCONT
  Beacon beacon(const std::string& name) const;
  /// What the rank has printed so far.
  std::string output(int rank) const;
  /// Waits for one rank alone; none: it still runs.
  std::optional<ExitStatus> wait(int rank,
                                 std::chrono::milliseconds timeout = std::chrono::seconds(30));

  /// Waits for all ranks and reports failures to the calling test; once. Ranks in `may_die` that
  /// are still stopped when the others have ended are killed.
  void join();

 private:
  struct State;
  std::unique_ptr<State> state_;  // null in ranks of a later run
};

/// A world of any size in the calling thread whose collectives move nothing (backend "fake"), for
/// the scope.
class FakeWorld {
 public:
  FakeWorld(int rank, int world_size);
  ~FakeWorld();
  FakeWorld(const FakeWorld&) = delete;
  FakeWorld& operator=(const FakeWorld&) = delete;

 private:
  std::unique_ptr<comm::ContextScope> scope_;
};

FakeWorld fake_world(int rank, int world_size);

}  // namespace tessera::testing
