#include "support/rank_run.h"
#include "support/ranks.h"
#include "support/reused_ranks.h"
#include "support/temporary_folder.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <limits>
#include <stdexcept>

namespace tessera::testing {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr size_t kReportedOutput = 20000;

int run_count = 0;  // runs begun in the current test

std::string test_name() {
  const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
  if (test == nullptr) throw std::logic_error("run_processes: call it inside a test");
  return std::string(test->test_suite_name()) + "." + test->name();
}

}  // namespace

RankEnvironment rank_environment(const RankOptions& options, int rank, int n) {
  RankEnvironment result;
  // Shards, repetitions and the report file are the parent's affair.
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name = std::string(*entry).substr(0, std::string(*entry).find('='));
    if (name.starts_with("GTEST_") || name == "XML_OUTPUT_FILE") result[name] = std::nullopt;
  }
  result["OMP_NUM_THREADS"] = "1";
  result["MKL_NUM_THREADS"] = "1";
  for (const auto& [name, value] : shared_gpu_environment(rank, n, options)) result[name] = value;
  for (const auto& [name, value] : options.environment) result[name] = value;
  result["TESSERA_TEST_RANK"] = std::to_string(rank);
  result["TESSERA_TEST_WORLD_SIZE"] = std::to_string(n);
  return result;
}

std::vector<std::string> rank_arguments(const std::string& test) {
  return {std::filesystem::read_symlink("/proc/self/exe").string(), "--gtest_filter=" + test,
          "--gtest_color=no", "--gtest_brief=1", "--gtest_also_run_disabled_tests"};
}

namespace {

/// Takes the run of the scope for the process's.
class ProcessRunScope {
 public:
  explicit ProcessRunScope(const RankRun& run) { set_process_run(&run); }
  ~ProcessRunScope() { set_process_run(nullptr); }
  ProcessRunScope(const ProcessRunScope&) = delete;
  ProcessRunScope& operator=(const ProcessRunScope&) = delete;
};

/// The body as this rank, then the end of the process or, if it is used again, of the test.
[[noreturn]] void live_as_rank(const ChildIdentity& identity, const RankBody& body,
                               const RankOptions& options) {
  RankRun run{.init_options = rank_identity(identity.rank, identity.world_size, options),
              .folder = identity.folder,
              .device = options.device};
  run.init_options.init_method = "file://" + (identity.folder / "store").string();
  const ProcessRunScope scope(run);
  at::set_num_threads(1);
  at::manual_seed(options.seed);
  run_body(body, options);
  int code = 0;
  if (::testing::Test::IsSkipped()) code = kExitSkipped;
  if (::testing::Test::HasFailure()) code = kExitFailed;
  if (is_reused_rank()) end_reused_run(code);
  std::cout.flush();
  std::exit(code);  // not _exit: leaving by the front door is part of what is tested
}

}  // namespace

void reset_run_count() { run_count = 0; }

namespace {

std::optional<ChildIdentity>& own_identity() {
  static auto identity = []() -> std::optional<ChildIdentity> {
    const char* rank = std::getenv("TESSERA_TEST_RANK");
    if (rank == nullptr) return std::nullopt;
    const auto variable = [](const char* name) {
      const char* value = std::getenv(name);
      if (value == nullptr)
        throw std::logic_error(std::string("TESSERA_TEST_RANK is set, but not ") + name);
      return value;
    };
    const int world_size = std::stoi(variable("TESSERA_TEST_WORLD_SIZE"));
    // Orders will say which run.
    if (is_reused_rank())
      return ChildIdentity{
          .rank = std::stoi(rank), .world_size = world_size, .call = -1, .folder = {}};
    return ChildIdentity{.rank = std::stoi(rank),
                         .world_size = world_size,
                         .call = std::stoi(variable("TESSERA_TEST_CALL")),
                         .folder = variable("TESSERA_TEST_FOLDER")};
  }();
  return identity;
}

}  // namespace

const std::optional<ChildIdentity>& child_identity() { return own_identity(); }
void set_child_identity(ChildIdentity identity) { own_identity() = std::move(identity); }

int say_not_reached() {
  std::cout << "rank " << child_identity()->rank << ": the test ended before its run "
            << child_identity()->call
            << " of processes began; it must come to the same runs in ranks as in the parent"
            << std::endl;
  return kExitNotReached;
}

bool RankEnd::failed() const {
  if (!status) return false;
  if (killed_by_harness) return true;
  if (status->signal != 0) return !may_die;
  return status->code != 0 && status->code != kExitSkipped;
}

void report_ends(const std::vector<RankEnd>& ends) {
  std::string skipped;
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    const RankEnd& end = ends[rank];
    std::string output = end.output;
    if (output.size() > kReportedOutput)
      output = "[…]" + output.substr(output.size() - kReportedOutput);
    if (end.status && end.status->code == kExitSkipped) skipped = output;
    if (end.status && !end.failed()) continue;
    ADD_FAILURE() << "rank " << rank << " of " << ends.size() << " (process): "
                  << (end.killed_by_harness
                          ? "still running at the deadline or 10 s after another rank had failed; "
                            "killed by "
                          : "ended by ")
                  << (end.status ? end.status->text() : "nothing") << "; its output:\n"
                  << output;
  }
  if (!skipped.empty()) GTEST_SKIP() << skipped;
}

struct RankProcesses::State {
  struct Rank {
    Subprocess process;
    bool may_die;
    bool killed_by_harness = false;
  };

  TemporaryFolder folder;
  RankOptions options;
  steady_clock::time_point begin = steady_clock::now();
  std::vector<Rank> ranks;
  bool joined = false;

  void start(int n, int call);
  void wait_for_all();
  void kill_leftovers(const std::vector<Subprocess*>& running);
  RankEnd end_of(Rank& rank) const;
  void report();
  std::vector<Subprocess*> running(bool& some_failed);
};

void RankProcesses::State::start(int n, int call) {
  for (int rank = 0; rank < n; ++rank) {
    RankEnvironment environment = rank_environment(options, rank, n);
    environment["TESSERA_TEST_CALL"] = std::to_string(call);
    environment["TESSERA_TEST_FOLDER"] = folder.path().string();
    SubprocessOptions child{.arguments = rank_arguments(test_name()),
                            .environment = std::move(environment),
                            .output = folder.path() / ("rank." + std::to_string(rank) + ".log")};
    const bool may_die = std::ranges::count(options.may_die, rank) > 0;
    ranks.push_back({.process = Subprocess(std::move(child)), .may_die = may_die});
  }
}

/// Without its output.
RankEnd RankProcesses::State::end_of(Rank& rank) const {
  return {.status = rank.process.wait(milliseconds(0)),
          .may_die = rank.may_die,
          .killed_by_harness = rank.killed_by_harness};
}

std::vector<Subprocess*> RankProcesses::State::running(bool& some_failed) {
  std::vector<Subprocess*> result;
  some_failed = false;
  for (Rank& rank : ranks) {
    const RankEnd end = end_of(rank);
    if (!end.status) result.push_back(&rank.process);
    some_failed = end.failed() || some_failed;
  }
  return result;
}

void RankProcesses::State::wait_for_all() {
  auto deadline = begin + options.deadline;
  bool grace_given = false;
  while (true) {
    bool some_failed = false;
    const std::vector<Subprocess*> left = running(some_failed);
    if (left.empty()) return;
    if (some_failed && !grace_given) {
      deadline = std::min(deadline, steady_clock::now() + kGraceAfterFailure);
      grace_given = true;
    }
    // Only ranks remain that the test has stopped for good: nobody will wake them.
    if (std::ranges::all_of(left, &Subprocess::stopped)) {
      for (Subprocess* process : left) {
        process->signal(SIGKILL);
        process->wait(std::chrono::seconds(10));
      }
      continue;
    }
    if (!wait_any(left, deadline)) return kill_leftovers(left);
  }
}

void RankProcesses::State::kill_leftovers(const std::vector<Subprocess*>& running) {
  for (Rank& rank : ranks) rank.killed_by_harness = std::ranges::count(running, &rank.process) > 0;
  // At this signal a rank writes down its last collectives: the report should tell where it hung.
  for (Subprocess* process : running) process->signal(SIGUSR2);
  for (Subprocess* process : running) {
    process->wait(milliseconds(500));
    process->signal(SIGKILL);
    process->wait(std::chrono::seconds(10));
  }
}

void RankProcesses::State::report() {
  std::vector<RankEnd> ends;
  for (Rank& rank : ranks) {
    ends.push_back(end_of(rank));
    ends.back().output = rank.process.output();
  }
  report_ends(ends);
}

RankProcesses::RankProcesses(int n, const RankBody& body, RankOptions options) {
  const int call = run_count++;
  if (const auto& identity = child_identity()) {
    if (call > identity->call)
      throw std::logic_error("run_processes: a body can't start ranks of its own");
    if (call == identity->call) live_as_rank(*identity, body, options);
    return;
  }
  state_ = std::make_unique<State>();
  state_->options = std::move(options);
  state_->start(n, call);
}

RankProcesses::~RankProcesses() {
  if (state_ && !state_->joined && !::testing::Test::HasFailure()) {
    ADD_FAILURE()
        << "RankProcesses: destroyed without join(), so nobody looked at what the ranks found";
  }
}

pid_t RankProcesses::pid(int rank) const {
  // No process has this one: 0 and -1 would mean many to kill(2).
  return state_ ? state_->ranks.at(rank).process.pid() : std::numeric_limits<pid_t>::max();
}

void RankProcesses::signal(int rank, int number) {
  if (number == SIGSTOP) return stop(rank);
  if (number == SIGCONT) return resume(rank);
  if (state_) state_->ranks.at(rank).process.signal(number);
}

void RankProcesses::kill(int rank) {
  signal(rank, SIGKILL);
  wait(rank);
}

void RankProcesses::stop(int rank) {
  if (state_) state_->ranks.at(rank).process.stop();
}

void RankProcesses::resume(int rank) {
  if (state_) state_->ranks.at(rank).process.resume();
}

Beacon RankProcesses::beacon(const std::string& name) const {
  return {state_ ? state_->folder.path() : std::filesystem::path(), name};
}

std::string RankProcesses::output(int rank) const {
  return state_ ? state_->ranks.at(rank).process.output() : std::string();
}

std::optional<ExitStatus> RankProcesses::wait(int rank, milliseconds timeout) {
  return state_ ? state_->ranks.at(rank).process.wait(timeout) : ExitStatus{};
}

void RankProcesses::join() {
  if (!state_ || state_->joined) return;
  state_->joined = true;
  state_->wait_for_all();
  state_->report();
}

void run_processes(int n, const RankBody& body, RankOptions options) {
  if (!child_identity() && reuses_ranks(options))
    return run_reused(test_name(), run_count++, n, options);
  RankProcesses processes(n, body, std::move(options));
  processes.join();
}

}  // namespace tessera::testing
