#include "support/forked_ranks.h"

#include "support/rank_run.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <system_error>

namespace tessera::testing {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

struct Child {
  const ForkedWorld* world;
  int rank;
  pid_t pid;
  std::filesystem::path log;
  bool ended = false;
  bool stopped = false;
  int status = 0;
};

std::string read_all(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// The rest of the forked process's life.
[[noreturn]] void live(const ForkedWorld& world, int rank, const std::filesystem::path& store) {
  {
    SCOPED_TRACE(world.name + ", rank " + std::to_string(rank));
    try {
      InitOptions options = world.options;
      options.rank = rank;
      options.world_size = world.ranks;
      options.local_rank = rank;
      options.init_method = "file://" + store.string();
      tessera::init(std::move(options));
      world.body();
      tessera::shutdown();
    } catch (const c10::Error& error) {
      ADD_FAILURE() << "threw c10::Error: " << error.what_without_backtrace();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "threw std::exception: " << error.what();
    }
  }
  std::cout.flush();
  // Not exit: what the process inherited is not the rank's to end.
  _exit(::testing::Test::HasFailure() ? kExitFailed : 0);
}

/// The process from which the ranks of all worlds are forked.
class Nursery {
 public:
  Nursery(const std::vector<ForkedWorld>& worlds, int at_once, milliseconds deadline)
      : worlds_(worlds), at_once_(at_once), deadline_(steady_clock::now() + deadline) {
    sigemptyset(&child_signal_);
    sigaddset(&child_signal_, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child_signal_, &usual_mask_);
  }

  void run() {
    size_t next = 0;
    while (next < worlds_.size() || running_worlds() > 0) {
      while (next < worlds_.size() && running_worlds() < at_once_) start(worlds_[next++]);
      if (!wait()) break;
      resume_those_left();
    }
    for (Child& child : children_) end(child);
    // Told at the end: a rank forked after a failure would take it for its own.
    for (const std::string& failure : failures_) ADD_FAILURE() << failure;
  }

 private:
  void start(const ForkedWorld& world) {
    const auto folder = current_run().folder;
    std::cout.flush();
    for (int rank = 0; rank < world.ranks; ++rank) {
      Child child{.world = &world,
                  .rank = rank,
                  .pid = -1,
                  .log = folder / (world.name + "." + std::to_string(rank) + ".log")};
      child.pid = fork();
      if (child.pid < 0) throw std::system_error(errno, std::generic_category(), "fork");
      if (child.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sigprocmask(SIG_SETMASK, &usual_mask_, nullptr);
        const int log = open(child.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        dup2(log, STDOUT_FILENO);
        dup2(log, STDERR_FILENO);
        live(world, rank, folder / (world.name + ".store"));
      }
      children_.push_back(std::move(child));
    }
  }

  /// Until something happened to a child; false at the deadline.
  bool wait() {
    while (true) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, WNOHANG | WUNTRACED);
      if (pid > 0) {
        note(pid, status);
        return true;
      }
      const auto left = deadline_ - steady_clock::now();
      if (left <= milliseconds(0)) return false;
      const auto seconds = std::chrono::ceil<std::chrono::seconds>(left).count();
      const timespec limit{.tv_sec = seconds, .tv_nsec = 0};
      sigtimedwait(&child_signal_, nullptr, &limit);
    }
  }

  void note(pid_t pid, int status) {
    const auto child = std::ranges::find(children_, pid, &Child::pid);
    if (child == children_.end()) return;
    child->stopped = WIFSTOPPED(status);
    child->ended = !child->stopped;
    child->status = status;
  }

  void resume_those_left() {
    for (Child& child : children_) {
      const bool alone = std::ranges::all_of(children_, [&](const Child& other) {
        return other.world != child.world || other.ended || other.stopped;
      });
      if (!child.stopped || !alone) continue;
      child.stopped = false;
      kill(child.pid, SIGCONT);
    }
  }

  int running_worlds() const {
    return static_cast<int>(std::ranges::count_if(worlds_, [&](const ForkedWorld& world) {
      return std::ranges::any_of(
          children_, [&](const Child& child) { return child.world == &world && !child.ended; });
    }));
  }

  void end(Child& child) {
    const std::string who = child.world->name + ", rank " + std::to_string(child.rank);
    if (!child.ended) {
      failures_.push_back(who + " still runs at the deadline; its output:\n" + read_all(child.log));
      kill(child.pid, SIGKILL);
      waitpid(child.pid, &child.status, 0);
      return;
    }
    const bool died = WIFSIGNALED(child.status);
    const bool may_die = std::ranges::count(child.world->may_die, child.rank) > 0;
    if (died ? may_die : WEXITSTATUS(child.status) == 0) return;
    const auto how = died ? "signal " + std::to_string(WTERMSIG(child.status))
                          : "exit code " + std::to_string(WEXITSTATUS(child.status));
    failures_.push_back(who + " ended by " + how + "; its output:\n" + read_all(child.log));
  }

  const std::vector<ForkedWorld>& worlds_;
  const int at_once_;
  const steady_clock::time_point deadline_;
  sigset_t child_signal_{};
  sigset_t usual_mask_{};
  std::vector<Child> children_;
  std::vector<std::string> failures_;
};

}  // namespace

void run_forked_worlds(const std::vector<ForkedWorld>& worlds, int at_once, milliseconds deadline) {
  run_processes(1, [&] { Nursery(worlds, at_once, deadline).run(); },
                {.init = false, .fresh = true});
}

}  // namespace tessera::testing
