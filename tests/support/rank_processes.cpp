#include "support/rank_run.h"
#include "support/ranks.h"
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

/// What the others get once a rank has failed: enough for a report of their own, too little to wait
/// out timeouts.
constexpr auto kGraceAfterFailure = std::chrono::seconds(10);
constexpr size_t kReportedOutput = 20000;

int run_count = 0;  // runs begun in the current test

std::string test_name() {
  const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
  if (test == nullptr) throw std::logic_error("run_processes: call it inside a test");
  return std::string(test->test_suite_name()) + "." + test->name();
}

std::map<std::string, std::optional<std::string>> rank_environment(
    const RankOptions& options, int rank, int n, int call, const std::filesystem::path& folder) {
  std::map<std::string, std::optional<std::string>> result;
  // Shards, repetitions and the report file are the parent's affair.
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name = std::string(*entry).substr(0, std::string(*entry).find('='));
    if (name.starts_with("GTEST_") || name == "XML_OUTPUT_FILE") result[name] = std::nullopt;
  }
  result["OMP_NUM_THREADS"] = "1";
  result["MKL_NUM_THREADS"] = "1";
  for (const auto& [name, value] : options.environment) result[name] = value;
  result["TESSERA_TEST_RANK"] = std::to_string(rank);
  result["TESSERA_TEST_WORLD_SIZE"] = std::to_string(n);
  result["TESSERA_TEST_CALL"] = std::to_string(call);
  result["TESSERA_TEST_FOLDER"] = folder.string();
  return result;
}

/// The rest of the process's life: the body as this rank.
[[noreturn]] void live_as_rank(const ChildIdentity& identity, const RankBody& body,
                               const RankOptions& options) {
  RankRun run{.init_options = rank_identity(identity.rank, identity.world_size, options),
              .folder = identity.folder};
  run.init_options.init_method = "file://" + (identity.folder / "store").string();
  set_process_run(&run);
  at::set_num_threads(1);
  at::manual_seed(options.seed);
  run_body(body, options);
  int code = 0;
  if (::testing::Test::IsSkipped()) code = kExitSkipped;
  if (::testing::Test::HasFailure()) code = kExitFailed;
  std::cout.flush();
  std::exit(code);  // not _exit: leaving by the front door is part of what is tested
}

}  // namespace

void reset_run_count() { run_count = 0; }

const std::optional<ChildIdentity>& child_identity() {
  static const auto identity = []() -> std::optional<ChildIdentity> {
    const char* rank = std::getenv("TESSERA_TEST_RANK");
    if (rank == nullptr) return std::nullopt;
    const auto variable = [](const char* name) {
      const char* value = std::getenv(name);
      if (value == nullptr)
        throw std::logic_error(std::string("TESSERA_TEST_RANK is set, but not ") + name);
      return value;
    };
    return ChildIdentity{.rank = std::stoi(rank),
                         .world_size = std::stoi(variable("TESSERA_TEST_WORLD_SIZE")),
                         .call = std::stoi(variable("TESSERA_TEST_CALL")),
                         .folder = variable("TESSERA_TEST_FOLDER")};
  }();
  return identity;
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
  bool failed(Rank& rank);
  void report();
  std::vector<Subprocess*> running(bool& some_failed);
};

void RankProcesses::State::start(int n, int call) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  for (int rank = 0; rank < n; ++rank) {
    SubprocessOptions child{
        .arguments = {program, "--gtest_filter=" + test_name(), "--gtest_color=no",
                      "--gtest_brief=1", "--gtest_also_run_disabled_tests"},
        .environment = rank_environment(options, rank, n, call, folder.path()),
        .output = folder.path() / ("rank." + std::to_string(rank) + ".log")};
    const bool may_die = std::ranges::count(options.may_die, rank) > 0;
    ranks.push_back({.process = Subprocess(std::move(child)), .may_die = may_die});
  }
}

/// True once the rank has ended in a way that the test did not allow.
bool RankProcesses::State::failed(Rank& rank) {
  const auto status = rank.process.wait(milliseconds(0));
  if (!status) return false;
  if (rank.killed_by_harness) return true;
  if (status->signal != 0) return !rank.may_die;
  return status->code != 0 && status->code != kExitSkipped;
}

std::vector<Subprocess*> RankProcesses::State::running(bool& some_failed) {
  std::vector<Subprocess*> result;
  some_failed = false;
  for (Rank& rank : ranks) {
    if (!rank.process.wait(milliseconds(0))) result.push_back(&rank.process);
    some_failed = failed(rank) || some_failed;
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
  std::string skipped;
  for (size_t index = 0; index < ranks.size(); ++index) {
    Rank& rank = ranks[index];
    const auto status = rank.process.wait(milliseconds(0));
    std::string output = rank.process.output();
    if (output.size() > kReportedOutput)
      output = "[…]" + output.substr(output.size() - kReportedOutput);
    if (status && status->code == kExitSkipped) skipped = output;
    if (status && !failed(rank)) continue;
    ADD_FAILURE() << "rank " << index << " of " << ranks.size() << " (process): "
                  << (rank.killed_by_harness
                          ? "still running at the deadline or 10 s after another rank had failed; "
                            "killed by "
                          : "ended by ")
                  << (status ? status->text() : "nothing") << "; its output:\n"
                  << output;
  }
  if (!skipped.empty()) GTEST_SKIP() << skipped;
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
  RankProcesses processes(n, body, std::move(options));
  processes.join();
}

}  // namespace tessera::testing
